/* A handler of a custom call in XLA that does nothing: see unwritten.py.
 *
 * Its signature is that of XLA's foreign function interface. XLA's header comes with jaxlib, which need not be there when
 * this is compiled: of its structures those fields are declared that are used, and the fields before them. None may move
 * (the interface only grows at the ends); `tests/lower/test_unwritten.py` compares them with the header.
 */

#include <stddef.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { METADATA = 1 }; /* the type of the extension with which XLA asks what a handler is */

struct extension {
    size_t size;
    int type;
    struct extension *next;
};

struct version {
    size_t size;
    struct extension *extension;
    int major, minor;
};

struct metadata {
    size_t size;
    struct version version;
};

struct metadata_extension {
    struct extension base;
    struct metadata *metadata;
};

struct call_frame {
    size_t size;
    struct extension *extension;
};

/* Returns no error. Asked for its version, it names the oldest that XLA takes. */
EXPORT void *firstloss_unwritten(struct call_frame *frame) {
    if (frame->extension && frame->extension->type == METADATA) {
        struct metadata *metadata = ((struct metadata_extension *)frame->extension)->metadata;
        metadata->version.major = 0;
        metadata->version.minor = 1;
    }
    return NULL;
}
