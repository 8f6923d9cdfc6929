/* Anonymous mappings whose pages can be moved to other addresses without a copy. */

#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

/* Like `Mapping` in pages.py. */
struct mapping {
    char *address; /* NULL: not mapped, or no longer */
    size_t size;
};

API int firstloss_map(struct mapping *made, size_t size)
{
    void *found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED)
        return 1;
    made->address = found;
    made->size = size;
    return 0;
}

API void firstloss_unmap(struct mapping *made)
{
    if (made->address)
        munmap(made->address, made->size);
    made->address = NULL;
}

/* Move `size` bytes from `from`, in `made`, to `to`, and unmap the rest of `made`. Whole pages are moved by `mremap`,
 * partial pages at both ends are copied.
 *
 * A single C call, so that no Python signal handler runs in between. Returns 0 on success, 1 if nothing was moved, 2 if
 * the pages at `to` are lost and could not be mapped again. */
API int firstloss_move(struct mapping *made, char *from, char *to, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (!made->address || ((uintptr_t)from - (uintptr_t)to) % page || size < 4 * page)
        return 1;
    size_t head = (page - (uintptr_t)to % page) % page;
    size_t whole = (size - head) / page * page;
    char *begin = made->address, *end = made->address + made->size;
    char *moved = from + head, *behind = moved + whole;
    if (mremap(moved, whole, whole, MREMAP_MAYMOVE | MREMAP_FIXED, to + head) == MAP_FAILED) {
        /* mremap may have unmapped what was there. */
        void *again = mmap(to + head, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        return again == MAP_FAILED ? 2 : 1;
    }
    memcpy(to, from, head);
    memcpy(to + head + whole, behind, size - head - whole);
    made->address = NULL;
    /* In whole pages: the page of `from` is not moved, nor is that of the end. */
    char *low = (char *)((uintptr_t)moved / page * page), *high = behind;
    if (low > begin)
        munmap(begin, (size_t)(low - begin));
    if (end > high)
        munmap(high, (size_t)(end - high));
    return 0;
}
