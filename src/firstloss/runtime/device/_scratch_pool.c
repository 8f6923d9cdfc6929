/* A pool of the large blocks that XLA's runtime allocates and frees at each step: see scratch_pool.py.
 *
 * XLA has no setting for its allocator, so the pool takes the place of `posix_memalign` and `free` in the table through
 * which XLA's library calls them, and only there, as memory profilers do. Every block is malloc's own: who frees one by
 * other ways frees it for good, and what the pool has noted of it is found to be outdated by its size. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum {
    LEAST_BYTES = 4 << 20, /* as of malloc_settings.py: smaller ones malloc keeps itself */
    PAGES = 1 << 16, /* bytes that are given back at a time */
    MOST_BLOCKS = 1024,
    MOST_SLOTS = 16,
    SLACK = 32, /* a part of the peak: so that a new batch, beside the one before, costs nothing */
};

struct block {
    char *address; /* NULL: none */
    size_t size;
    size_t kept;  /* in the pool: of these bytes, from the first on, the pages are kept; else 0 */
    time_t since; /* when it was allocated; in the pool, when it came there */
};

static struct block blocks[MOST_BLOCKS];
static int count; /* of the first places that have been used */
static size_t used, most_used, kept;
static time_t longest_use, longest_rest; /* seconds: see `firstloss_use_pool` */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*allocate)(void **, size_t, size_t);
static void (*release)(void *);

static time_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return time.tv_sec;
}

/* Notes that a block is in use from now on. */
static void begin(struct block *block, char *address, size_t size) {
    *block = (struct block){address, size, 0, now()};
    used += size;
    most_used = used > most_used ? used : most_used;
}

static void drop(struct block *block) {
    if (block->kept) {
        kept -= block->kept;
    } else {
        used -= block->size;
    }
    block->address = NULL;
}

/* Frees what is in the pool for too long; and of the rest, the longest there first, as many pages as are more than `most`. */
static void trim(size_t most) {
    time_t oldest = now() - longest_rest;
    for (;;) {
        struct block *first = NULL;
        for (struct block *block = blocks; block < blocks + count; block++) {
            if (block->address != NULL && block->kept && (first == NULL || block->since < first->since)) {
                first = block;
            }
        }
        if (first == NULL || (first->since >= oldest && kept <= most)) {
            return;
        }
        size_t left = first->since < oldest || kept - most >= first->kept ? 0 : first->kept - (kept - most);
        char *address = first->address, *end = address + first->kept;
        char *from = (char *)((uintptr_t)(address + left) & ~(uintptr_t)(PAGES - 1));
        if (from <= address || from >= end || madvise(from, (size_t)(end - from) & ~(size_t)(PAGES - 1), MADV_DONTNEED) != 0) {
            drop(first);
            release(address);
        } else {
            kept -= (size_t)(end - from);
            first->kept = (size_t)(from - address);
        }
    }
}

/* How much may be in the pool beside what is in use, and `size` more. */
static size_t room(size_t size) {
    size_t most = most_used + most_used / SLACK;
    return most > used + size ? most - used - size : 0;
}

/* The smallest block in the pool that has the size, and not an eighth more. */
static struct block *fitting(size_t size, size_t alignment) {
    struct block *best = NULL;
    for (struct block *block = blocks; block < blocks + count; block++) {
        if (block->address != NULL && block->kept && block->size >= size && block->size - size <= size / 8 &&
            (uintptr_t)block->address % alignment == 0 && (best == NULL || block->size < best->size)) {
            best = block;
        }
    }
    return best;
}

static void note(char *address) {
    struct block *place = NULL;
    for (struct block *block = blocks; block < blocks + count; block++) {
        if (block->address == address) { /* it was freed in another way */
            drop(block);
        }
        if (block->address == NULL && place == NULL) {
            place = block;
        }
    }
    if (place == NULL && count < MOST_BLOCKS) {
        place = blocks + count++;
    }
    if (place != NULL) {
        begin(place, address, malloc_usable_size(address));
    }
}

static int allocate_pooled(void **made, size_t alignment, size_t size) {
    if (size < LEAST_BYTES) {
        return allocate(made, alignment, size);
    }
    pthread_mutex_lock(&lock);
    struct block *block = fitting(size, alignment);
    if (block != NULL) {
        *made = block->address;
        kept -= block->kept;
        begin(block, block->address, block->size);
        trim(room(0)); /* all its pages are in use now, also those that had been given back */
        pthread_mutex_unlock(&lock);
        return 0;
    }
    trim(room(size));
    int failed = allocate(made, alignment, size);
    if (!failed) {
        note(*made);
    }
    pthread_mutex_unlock(&lock);
    return failed;
}

static void release_pooled(void *address) {
    size_t size = address == NULL ? 0 : malloc_usable_size(address);
    if (size < LEAST_BYTES) {
        release(address);
        return;
    }
    pthread_mutex_lock(&lock);
    for (struct block *block = blocks; block < blocks + count; block++) {
        if (block->address != address || block->kept) {
            continue;
        }
        int is_scratch = block->size == size && now() - block->since <= longest_use;
        drop(block);
        if (is_scratch) {
            *block = (struct block){address, size, size, now()};
            kept += size;
            address = NULL;
        }
        break;
    }
    trim(room(0));
    pthread_mutex_unlock(&lock);
    if (address != NULL) {
        release(address);
    }
}

/* --- The table through which a library calls others --- */

#if defined(__x86_64__)
enum { DIRECT = R_X86_64_64, DATA = R_X86_64_GLOB_DAT, CALL = R_X86_64_JUMP_SLOT };
#elif defined(__aarch64__)
enum { DIRECT = R_AARCH64_ABS64, DATA = R_AARCH64_GLOB_DAT, CALL = R_AARCH64_JUMP_SLOT };
#else
enum { DIRECT = -1, DATA = -1, CALL = -1 };
#endif

/* The places where a library has the addresses of the two functions. */
struct slots {
    const char *library;
    void **places[2][MOST_SLOTS];
    int counts[2];
};

static const char *const NAMES[2] = {"free", "posix_memalign"};

static int find_slots(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct slots *slots = data;
    const char *name = strrchr(info->dlpi_name, '/');
    if (strcmp(name == NULL ? info->dlpi_name : name + 1, slots->library) != 0) {
        return 0;
    }
    const ElfW(Dyn) *entry = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) {
            entry = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        }
    }
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    const ElfW(Rela) *tables[2] = {NULL, NULL};
    size_t sizes[2] = {0, 0};
    for (; entry != NULL && entry->d_tag != DT_NULL; entry++) {
        switch (entry->d_tag) {
        case DT_SYMTAB: symbols = (const ElfW(Sym) *)entry->d_un.d_ptr; break;
        case DT_STRTAB: strings = (const char *)entry->d_un.d_ptr; break;
        case DT_RELA: tables[0] = (const ElfW(Rela) *)entry->d_un.d_ptr; break;
        case DT_JMPREL: tables[1] = (const ElfW(Rela) *)entry->d_un.d_ptr; break;
        case DT_RELASZ: sizes[0] = entry->d_un.d_val; break;
        case DT_PLTRELSZ: sizes[1] = entry->d_un.d_val; break;
        }
    }
    if (symbols == NULL || strings == NULL) {
        return 1;
    }
    for (int t = 0; t < 2; t++) {
        for (const ElfW(Rela) *rela = tables[t]; rela != NULL && rela < tables[t] + sizes[t] / sizeof *rela; rela++) {
            int type = (int)ELF64_R_TYPE(rela->r_info);
            if (type != CALL && type != DATA && !(type == DIRECT && rela->r_addend == 0)) {
                continue;
            }
            const char *symbol = strings + symbols[ELF64_R_SYM(rela->r_info)].st_name;
            for (int i = 0; i < 2; i++) {
                if (strcmp(symbol, NAMES[i]) == 0 && slots->counts[i]++ < MOST_SLOTS) {
                    slots->places[i][slots->counts[i] - 1] = (void **)(info->dlpi_addr + rela->r_offset);
                }
            }
        }
    }
    return 1;
}

/* Whether a function is the C library's own, not one that was loaded instead of it. */
static void *of_c_library(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    Dl_info info;
    return found != NULL && dladdr(found, &info) && strstr(info.dli_fname, "/libc.so") != NULL ? found : NULL;
}

/* Some places are in pages that cannot be written to once a library is loaded. */
static int set(void **place, void *function) {
    uintptr_t page = (uintptr_t)place & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    size_t size = (uintptr_t)place + sizeof *place - page;
    if (mprotect((void *)page, size, PROT_READ | PROT_WRITE) != 0) {
        return 1;
    }
    __atomic_store_n(place, function, __ATOMIC_RELEASE);
    return 0;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork(void) { pthread_mutex_unlock(&lock); }

/* Lets `library`, of this file name, use the pool, which keeps what has been in use for at most `use` seconds, and was in
 * the pool for at most `rest`. Returns 0 on success. */
API int firstloss_use_pool(const char *library, int use, int rest) {
    struct slots slots = {library, {{NULL}}, {0, 0}};
    void *functions[2] = {of_c_library(NAMES[0]), of_c_library(NAMES[1])};
    if (CALL == -1 || functions[0] == NULL || functions[1] == NULL) {
        return 1;
    }
    dl_iterate_phdr(find_slots, &slots);
    for (int i = 0; i < 2; i++) {
        if (slots.counts[i] < 1 || slots.counts[i] > MOST_SLOTS) {
            return 1;
        }
    }
    if (allocate == NULL) {
        pthread_atfork(before_fork, after_fork, after_fork);
    }
    longest_use = use;
    longest_rest = rest;
    release = (void (*)(void *))functions[0];
    allocate = (int (*)(void **, size_t, size_t))functions[1];
    void *replacements[2] = {(void *)release_pooled, (void *)allocate_pooled};
    for (int i = 0; i < 2; i++) { /* `free` first: it also frees what was allocated before */
        for (int k = 0; k < slots.counts[i]; k++) {
            if (set(slots.places[i][k], replacements[i]) != 0) {
                return 1; /* those of `free` that are set work without the others */
            }
        }
    }
    return 0;
}

/* The bytes in the pool. */
API size_t firstloss_pooled(void) {
    pthread_mutex_lock(&lock);
    size_t bytes = kept;
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* Frees what is in the pool. */
API void firstloss_empty_pool(void) {
    pthread_mutex_lock(&lock);
    trim(0);
    most_used = used;
    pthread_mutex_unlock(&lock);
}
