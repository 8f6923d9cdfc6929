/* Memory that is mapped by itself, so that its pages can be moved beneath other addresses without a copy. */

#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

/* As `Mapping` in pages.py. */
struct mapping {
    char *address; /* NULL: there is none, or no more */
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

/* Move `size` bytes at `from`, in `made`, to `to`, and unmap the rest of `made`: whole pages by the page tables, what is
 * before the first and behind the last by a copy.
 *
 * One call, so that no signal handler of Python's runs within. Returns 0 if that was done, 1 if nothing was, 2 if the
 * system has taken the pages at `to` away and gives none. */
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
        /* It may have unmapped what was there. */
        void *again = mmap(to + head, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        return again == MAP_FAILED ? 2 : 1;
    }
    memcpy(to, from, head);
    memcpy(to + head + whole, behind, size - head - whole);
    made->address = NULL;
    /* In whole pages: `from` lies in one that is not moved, and so does the end. */
    char *low = (char *)((uintptr_t)moved / page * page), *high = behind;
    if (low > begin)
        munmap(begin, (size_t)(low - begin));
    if (end > high)
        munmap(high, (size_t)(end - high));
    return 0;
}
