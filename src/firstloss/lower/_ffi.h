/* What handlers of custom calls need of XLA's foreign function interface.
 *
 * XLA's header comes with jaxlib, which need not be there when a handler is compiled: of its structures those fields are
 * declared that are used, and the fields before them. None may move (the interface only grows at the ends);
 * `tests/lower/test_unwritten.py` compares them with the header.
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

/* Whether XLA only asks for the handler's version; it is told the oldest that it takes. */
static int is_asked_for_version(struct extension *extension) {
    if (!extension || extension->type != METADATA) return 0;
    struct metadata *metadata = ((struct metadata_extension *)extension)->metadata;
    metadata->version.major = 0;
    metadata->version.minor = 1;
    return 1;
}
