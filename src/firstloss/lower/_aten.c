/* Handlers of custom calls in XLA that call PyTorch's own kernels on a CPU: see aten.py.
 *
 * PyTorch's functions are those of the C interface that its ahead-of-time compiler's programs call
 * (torch/csrc/inductor/aoti_torch); aten.py finds them, and hands them over. An operation is cut into shares, which XLA's
 * own threads take; each runs PyTorch's kernel on one thread. (PyTorch would start a team of OpenMP's threads for each
 * thread that calls it, which go on spinning for milliseconds, on the cores on which XLA goes on.)
 *
 * XLA's structures are declared as in _ffi.h (PyTorch's need none); `tests/lower/test_aten.py` compares them with the
 * header.
 */

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "_ffi.h"
#include "_norms.h"
#include "_pointwise.h"
#include "_threefry.h"

#if defined(__x86_64__) && defined(__GLIBC__)
// These moved within glibc in 2.34: under their older versions, a wheel that is built there also runs where PyTorch's do.
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_detach, pthread_detach@GLIBC_2.2.5");
#endif

/* --- XLA's structures --- */

enum { U8 = 6, U16 = 7, U32 = 8, U64 = 9, F32 = 11, F64 = 12, BF16 = 16 };
enum { INTERNAL = 13 };

struct buffer {
    size_t size;
    struct extension *extension;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
};

struct array {
    int dtype;
    size_t size;
    void *data;
};

struct operands { /* of arguments and of results */
    size_t size;
    struct extension *extension;
    int64_t count;
    int *types;
    void **buffers;
};

struct attributes {
    size_t size;
    struct extension *extension;
    int64_t count;
    int *types;
    void **names;
    void **values;
};

struct error_arguments {
    size_t size;
    struct extension *extension;
    const char *message;
    int code;
};

struct schedule_arguments {
    size_t size;
    struct extension *extension;
    void *context;
    void (*task)(void *);
    void *data;
};

struct count_arguments {
    size_t size;
    struct extension *extension;
    void *context;
    int64_t *count;
};

struct create_future_arguments {
    size_t size;
    struct extension *extension;
    void *future;
};

struct complete_future_arguments {
    size_t size;
    struct extension *extension;
    void *future;
    void *error; /* of a failure only */
};

struct api {
    size_t size;
    struct extension *extension;
    struct version version;
    const void *internal;
    void *(*create_error)(struct error_arguments *);
    void *(*not_called[10])(void *);
    void *(*schedule)(struct schedule_arguments *);
    void *(*count_threads)(struct count_arguments *);
    void *(*create_future)(struct create_future_arguments *);
    void *(*complete_future)(struct complete_future_arguments *);
    void *(*fail_future)(struct complete_future_arguments *);
};

struct call_frame {
    size_t size;
    struct extension *extension;
    const struct api *api;
    void *context;
    int stage;
    struct operands arguments;
    struct operands results;
    struct attributes attributes;
    void *future; /* given to XLA, if the call goes on after the handler has returned */
};

/* --- PyTorch's functions, in the order in which aten.py gives them --- */

typedef void *tensor;

static struct {
    int32_t (*float32)(void);
    int32_t (*float64)(void);
    int32_t (*bfloat16)(void);
    int32_t (*cpu)(void);
    int32_t (*from_blob)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, tensor *);
    int32_t (*delete)(tensor);
    int32_t (*copy)(tensor, tensor, int32_t);
    int32_t (*convolution)(tensor, tensor, tensor *, const int64_t *, int64_t, const int64_t *, int64_t, const int64_t *,
                           int64_t, int32_t, const int64_t *, int64_t, int64_t, tensor *);
    int32_t (*convolution_backward)(tensor, tensor, tensor, const int64_t **, int64_t, const int64_t *, int64_t,
                                    const int64_t *, int64_t, const int64_t *, int64_t, int32_t, const int64_t *, int64_t,
                                    int64_t, const int32_t *, int64_t, tensor *, tensor *, tensor *);
    int32_t (*call)(const char *, const char *, uint64_t *, uint64_t); /* torch_call_dispatcher */
    int32_t (*new_list)(size_t, void **);
    int32_t (*append)(void *, uint64_t);
    void *(*new)(size_t); /* C++'s, of memory that PyTorch deletes */
    int32_t (*mm_out)(tensor, tensor, tensor);
    int32_t (*addmm_out)(tensor, tensor, tensor, tensor, double, double);
    int32_t (*bmm_out)(tensor, tensor, tensor);
    int32_t (*attention)(tensor, tensor, tensor, double, int32_t, tensor *, double *, tensor *, tensor *);
    int32_t (*attention_backward)(tensor, tensor, tensor, tensor, tensor, tensor, double, int32_t, tensor *, double *,
                                  tensor *, tensor *, tensor *);
    int (*get_threads)(void);
    void (*set_threads)(int);
    int (*set_mkl_threads)(int); /* NULL where PyTorch has no MKL */
    const char *(*what)(void);   /* this thread's latest error; NULL where PyTorch prints it itself */
    void *(*python_thread)(void); /* CPython's: the state of this thread, or NULL */
} torch_;

enum { MOST_DIMENSIONS = 8, MOST_ARRAYS = 16 };

/* What one share has of an array: of one dimension, places `from` to `to`; dimension -1: all. */
struct range {
    int dimension;
    int64_t from, to;
};

/* How a tensor's dimensions lie in XLA's memory, which is row-major: as they are, matrices by columns, or (batch, length,
 * heads, ...) for (batch, heads, length, ...). */
enum order { ROWS, COLUMNS, HEADS };

/* PyTorch's number of a dtype, and the bytes of an element. */
struct kind {
    int32_t dtype;
    int64_t bytes;
};

/* A tensor of a part of XLA's memory, or NULL: what two ranges have in common. */
static tensor lent_as(const struct buffer *buffer, struct kind kind, struct range range, struct range other,
                      enum order order) {
    int64_t strides[MOST_DIMENSIONS], dims[MOST_DIMENSIONS], stride = 1, begin = 0;
    tensor made = NULL;
    if (buffer->rank > MOST_DIMENSIONS) {
        return NULL;
    }
    for (int64_t i = buffer->rank - 1; i >= 0; i--) {
        int64_t d = order == COLUMNS && i >= buffer->rank - 2 ? 2 * buffer->rank - 3 - i
                    : order == HEADS && (i == 1 || i == 2)    ? 3 - i
                                                              : i;
        strides[d] = stride;
        dims[d] = buffer->dims[i];
        stride *= buffer->dims[i];
        if (d == range.dimension || d == other.dimension) {
            struct range cut = d == range.dimension ? range : other;
            begin += cut.from * strides[d];
            dims[d] = cut.to - cut.from;
        }
    }
    char *data = (char *)buffer->data + begin * kind.bytes;
    if (torch_.from_blob(data, buffer->rank, dims, strides, 0, kind.dtype, torch_.cpu(), 0, &made)) {
        return NULL;
    }
    return made;
}

static tensor lent_part(const struct buffer *buffer, struct range range, struct range other, enum order order) {
    switch (buffer->dtype) {
    case F32: return lent_as(buffer, (struct kind){torch_.float32(), 4}, range, other, order);
    case F64: return lent_as(buffer, (struct kind){torch_.float64(), 8}, range, other, order);
    case BF16: return lent_as(buffer, (struct kind){torch_.bfloat16(), 2}, range, other, order);
    }
    return NULL;
}

static const struct range ALL = {-1, 0, 0};

static tensor lent_in_order(const struct buffer *buffer, struct range range, enum order order) {
    return lent_part(buffer, range, ALL, order);
}

static tensor lent(const struct buffer *buffer, struct range range) { return lent_in_order(buffer, range, ROWS); }

/* Copies what PyTorch has made to where XLA wants it. */
static int keep_in_order(tensor made, const struct buffer *buffer, struct range range, enum order order) {
    tensor to = lent_in_order(buffer, range, order);
    int failed = made == NULL || to == NULL || torch_.copy(to, made, 0);
    if (to != NULL) {
        torch_.delete(to);
    }
    return failed;
}

static int keep(tensor made, const struct buffer *buffer, struct range range) {
    return keep_in_order(made, buffer, range, ROWS);
}

static void release(tensor *tensors, int count) {
    for (int i = 0; i < count; i++) {
        if (tensors[i] != NULL) {
            torch_.delete(tensors[i]);
        }
    }
}

/* --- The calls --- */

static int64_t channels(const struct buffer *buffer) { return buffer->dims[1]; }

static int64_t elements(const struct buffer *buffer) {
    int64_t count = 1;
    for (int64_t d = 0; d < buffer->rank; d++) {
        count *= buffer->dims[d];
    }
    return count;
}

/* The one attribute of a convolution: transposed, groups, then of each dimension of space the stride, of each the padding,
 * the dilation, the output's padding. */
struct how {
    int space;
    int32_t transposed;
    int64_t groups;
    const int64_t *stride, *padding, *dilation, *output_padding;
};

static struct how how_of(const struct call_frame *frame) {
    const struct array *array = frame->attributes.values[0];
    const int64_t *numbers = array->data;
    int space = (int)((array->size - 2) / 4);
    const int64_t *rest = numbers + 2;
    return (struct how){space, (int32_t)numbers[0], numbers[1], rest, rest + space, rest + 2 * space, rest + 3 * space};
}

/* Along what an operation is cut. Each share of a GROUPS' has some of the groups. */
enum cut { NOT, BATCH, OUT, IN, GROUPS };

struct part {
    enum cut cut;
    int64_t from, to;
};

enum role { INPUT, WEIGHT, BIAS, OUTPUT };

/* What a part of the operation has of an array. */
static struct range range_of(struct part part, enum role role, const struct buffer *buffer, const struct how *how) {
    static const int dimensions[5][4] = {
        [NOT] = {-1, -1, -1, -1},
        [BATCH] = {0, -1, -1, 0},
        [OUT] = {-1, 0, 0, 1},
        [IN] = {1, 1, -1, -1},
        [GROUPS] = {1, 0, 0, 1},
    };
    int d = dimensions[part.cut][role];
    if (role == WEIGHT && how->transposed && (part.cut == OUT || part.cut == IN)) {
        d = 1 - d;
    }
    int64_t each = d >= 0 && part.cut == GROUPS ? buffer->dims[d] / how->groups : 1;
    return (struct range){d, part.from * each, part.to * each};
}

enum { LEAST_CHANNELS = 16 }; /* of a share; with fewer, PyTorch's kernels do not fill a vector */

/* One cut of an operation into shares. */
struct pieces {
    enum cut cut;
    int64_t length, shares;
};

/* How many samples each share must have: in three dimensions PyTorch leaves a single small one to a kernel
 * that takes ten times as long as oneDNN. (What it takes for the size leaves out the last dimension.) */
static int64_t least_samples(const struct buffer *x) {
    return x->rank == 5 && x->dims[1] * x->dims[2] * x->dims[3] <= 20480 ? 2 : 1;
}

/* How to cut: into as many shares as can be; by the batch, so that each share reads all of the weight, only if that is
 * no larger than the other operand, of which each share of the channels reads all. */
static struct pieces best_cut(int64_t batch, int64_t channels, enum cut by_channels, int light_weight,
                              const struct how *how, int64_t threads, int64_t least) {
    int64_t by_weight = how->groups == 1 ? channels / LEAST_CHANNELS : how->groups;
    int64_t by_batch = batch / least < threads ? batch / least : threads;
    by_weight = by_weight < threads ? by_weight : threads;
    if (by_batch <= 1 && by_weight <= 1) {
        return (struct pieces){NOT, 1, 1};
    }
    if (by_batch > by_weight || (by_batch == by_weight && light_weight)) {
        return (struct pieces){BATCH, batch, by_batch};
    }
    return how->groups == 1 ? (struct pieces){by_channels, channels, by_weight}
                            : (struct pieces){GROUPS, how->groups, by_weight};
}

static struct part part_of(struct pieces pieces, int64_t share) {
    return (struct part){pieces.cut, pieces.length * share / pieces.shares, pieces.length * (share + 1) / pieces.shares};
}

static int64_t groups_of(struct part part, const struct how *how) {
    return part.cut == GROUPS ? part.to - part.from : how->groups;
}

static int convolve(const struct call_frame *frame, struct how how, struct part part) {
    static const enum role roles[3] = {INPUT, WEIGHT, BIAS};
    tensor given[3] = {NULL, NULL, NULL}, made = NULL;
    int failed = 0, n = how.space, count = (int)frame->arguments.count;
    for (int i = 0; i < count; i++) {
        const struct buffer *buffer = frame->arguments.buffers[i];
        given[i] = lent(buffer, range_of(part, roles[i], buffer, &how));
        failed |= given[i] == NULL;
    }
    const struct buffer *result = frame->results.buffers[0];
    failed = failed ||
             torch_.convolution(given[0], given[1], count == 3 ? &given[2] : NULL, how.stride, n, how.padding, n,
                                how.dilation, n, how.transposed, how.output_padding, n, groups_of(part, &how), &made) ||
             keep(made, result, range_of(part, OUTPUT, result, &how));
    release(given, 3);
    release(&made, 1);
    return failed;
}

/* The gradient of the input (0) or of the weight (1), into the result number `place`. */
static int gradient(const struct call_frame *frame, struct how how, struct part part, int of, int place) {
    static const enum role roles[3] = {OUTPUT, INPUT, WEIGHT};
    int32_t mask[3] = {of == 0, of == 1, 0};
    tensor given[3] = {NULL, NULL, NULL}, made[3] = {NULL, NULL, NULL};
    int failed = 0, n = how.space;
    for (int i = 0; i < 3; i++) {
        const struct buffer *buffer = frame->arguments.buffers[i];
        given[i] = lent(buffer, range_of(part, roles[i], buffer, &how));
        failed |= given[i] == NULL;
    }
    const struct buffer *result = frame->results.buffers[place];
    failed = failed ||
             torch_.convolution_backward(given[0], given[1], given[2], NULL, 0, how.stride, n, how.padding, n,
                                         how.dilation, n, how.transposed, how.output_padding, n, groups_of(part, &how),
                                         mask, 3, &made[0], &made[1], &made[2]) ||
             keep(made[of], result, range_of(part, of == 0 ? INPUT : WEIGHT, result, &how));
    release(given, 3);
    release(made, 3);
    return failed;
}

/* MKL multiplies up to 128 rows by a matrix of rows without packing the matrix. Where its rows are a multiple of 2 KB
 * apart, what it reads of a column falls into few sets of the cache, and it takes twice as long (78 against 158 GFLOP/s on a
 * core, for 2048 x 2048), unless there are few rows at a time. */
enum { UNPACKED_ROWS = 128, CONFLICTING_FLOATS = 512, ROWS_AT_A_TIME = 128 };

static int is_slow_unpacked(const struct buffer *matrix, int by_columns, int64_t rows) {
    return matrix->dtype == F32 && !by_columns && rows <= UNPACKED_ROWS && matrix->dims[0] > ROWS_AT_A_TIME &&
           matrix->dims[1] % CONFLICTING_FLOATS == 0;
}

/* Which of the two matrices of a product lie by columns, is its one attribute. */
static const int64_t *by_columns_of(const struct call_frame *frame) {
    return ((const struct array *)frame->attributes.values[0])->data;
}

/* Some of a batch of products, written where XLA wants them. */
static int multiply_pairs(const struct call_frame *frame, struct part part) {
    const int64_t *by_columns = by_columns_of(frame);
    struct buffer **given = (struct buffer **)frame->arguments.buffers;
    struct range pairs = part.cut == BATCH ? (struct range){0, part.from, part.to} : ALL;
    tensor all[3] = {
        lent(frame->results.buffers[0], pairs),
        lent_in_order(given[0], pairs, by_columns[0] ? COLUMNS : ROWS),
        lent_in_order(given[1], pairs, by_columns[1] ? COLUMNS : ROWS),
    };
    int failed = all[0] == NULL || all[1] == NULL || all[2] == NULL || torch_.bmm_out(all[0], all[1], all[2]);
    release(all, 3);
    return failed;
}

/* Some rows or columns of a product of two matrices. */
static int multiply(const struct call_frame *frame, struct part part) {
    const int64_t *by_columns = by_columns_of(frame);
    struct buffer **given = (struct buffer **)frame->arguments.buffers;
    const struct buffer *result = frame->results.buffers[0];
    if (result->rank == 3) {
        return multiply_pairs(frame, part);
    }
    struct range rows = part.cut == BATCH ? (struct range){0, part.from, part.to} : ALL;
    struct range columns = part.cut == OUT ? (struct range){1, part.from, part.to} : ALL;
    enum order order_a = by_columns[0] ? COLUMNS : ROWS, order_b = by_columns[1] ? COLUMNS : ROWS;
    tensor made = lent(result, part.cut == BATCH ? rows : columns); /* ALL where it is not cut */
    int64_t count = part.cut == BATCH ? part.to - part.from : result->dims[0], summed = given[1]->dims[by_columns[1] ? 1 : 0];
    int64_t step = is_slow_unpacked(given[1], (int)by_columns[1], count) ? ROWS_AT_A_TIME : summed;
    int failed = made == NULL;
    for (int64_t from = 0; !failed && from < summed; from += step) {
        int64_t to = from + step < summed ? from + step : summed;
        tensor a = lent_part(given[0], rows, (struct range){1, from, to}, order_a);
        tensor b = lent_part(given[1], columns, (struct range){0, from, to}, order_b);
        failed = a == NULL || b == NULL ||
                 (from == 0 ? torch_.mm_out(made, a, b) : torch_.addmm_out(made, made, a, b, 1.0, 1.0));
        release(&a, 1);
        release(&b, 1);
    }
    release(&made, 1);
    return failed;
}

/* Attention's attributes are whether it is causal, and the scale. All arrays are (batch, length, heads, ...), but the mask
 * (batch or 1, heads or 1, length, length), which is the last argument where there is one. */
static int attend(const struct call_frame *frame, struct part part, int backward) {
    const int64_t *causal = ((const struct array *)frame->attributes.values[0])->data;
    double scale = *(const double *)((const struct array *)frame->attributes.values[1])->data;
    struct buffer **arrays = (struct buffer **)frame->arguments.buffers;
    int plain = backward ? 6 : 3, made_count = backward ? 3 : 2, failed = 0;
    const struct buffer *key = arrays[backward ? 2 : 1];
    tensor given[7] = {NULL}, made[3] = {NULL};
    for (int i = 0; i < (int)frame->arguments.count; i++) {
        int64_t heads = i < plain ? arrays[i]->dims[2] : arrays[i]->dims[1], batch = arrays[i]->dims[0];
        int64_t each = part.cut == GROUPS && heads > 1 ? heads / key->dims[2] : 1;
        int whole = part.cut == NOT || (i == plain && (part.cut == GROUPS ? heads : batch) == 1);
        struct range range = {whole ? -1 : part.cut == GROUPS, part.from * each, part.to * each};
        given[i] = lent_in_order(arrays[i], range, i < plain ? HEADS : ROWS);
        failed |= given[i] == NULL;
    }
    tensor *mask = (int)frame->arguments.count > plain ? &given[plain] : NULL;
    failed = failed ||
             (backward ? torch_.attention_backward(given[0], given[1], given[2], given[3], given[4], given[5], 0.0,
                                                   (int32_t)*causal, mask, &scale, &made[0], &made[1], &made[2])
                       : torch_.attention(given[0], given[1], given[2], 0.0, (int32_t)*causal, mask, &scale, &made[0],
                                          &made[1]));
    for (int i = 0; !failed && i < made_count; i++) {
        const struct buffer *result = frame->results.buffers[i];
        int64_t each = part.cut == GROUPS ? result->dims[2] / key->dims[2] : 1;
        struct range range = {part.cut == NOT ? -1 : part.cut == GROUPS, part.from * each, part.to * each};
        failed = keep_in_order(made[i], result, range, HEADS);
    }
    release(given, 7);
    release(made, 3);
    return failed;
}

/* An operation by its name, as PyTorch's dispatcher calls it. The attributes are the name, with the overload's after it, and
 * the operands: each an entry and its words. An array's are its number, PyTorch's dtype, the bytes of an element, and the
 * dimension along which the operation may be cut, or -1. Results are written where XLA wants them. */
enum entry {
    GIVEN_NONE,
    GIVEN_NUMBER,
    GIVEN_LIST,
    GIVEN_ARRAY,
    GIVEN_RESULT,
    OPTIONAL /* the next operand is */
};
enum { MOST_OPERANDS = 24 };
static const uint64_t VERSION = 2ULL << 56 | 11ULL << 48; /* of the convention that is followed: 2.11's */

struct operand {
    enum entry entry;
    const int64_t *words;
};

static const int64_t *next_operand(const int64_t *words, struct operand *operand) {
    static const int lengths[] = {0, 1, 1, 4, 4, 0};
    *operand = (struct operand){(enum entry)words[0], words + 1};
    return words + 1 + lengths[words[0]] + (operand->entry == GIVEN_LIST ? words[1] : 0);
}

static const struct buffer *array_of(const struct call_frame *frame, struct operand operand) {
    const struct operands *arrays = operand.entry == GIVEN_ARRAY ? &frame->arguments : &frame->results;
    return arrays->buffers[operand.words[0]];
}

static void *list_of(const int64_t *words) {
    void *list = NULL;
    int failed = torch_.new_list((size_t)words[0], &list);
    for (int64_t i = 1; !failed && i <= words[0]; i++) {
        failed = torch_.append(list, (uint64_t)words[i]);
    }
    return failed ? NULL : list;
}

/* XLA's threads take numbers close to zero for zero, which PyTorch's do not: such a number is not sorted as zero is. Returns
 * what is to be set again. */
static uint64_t set_exact(uint64_t control) {
#if defined(__SSE2__)
    uint64_t before = _mm_getcsr();
    _mm_setcsr((unsigned)control);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(control));
    return before;
#else
    return control;
#endif
}

#if defined(__SSE2__)
static const uint64_t EXACT = 0x1F80; /* all exceptions masked, nothing flushed to zero */
#else
static const uint64_t EXACT = 0;
#endif

static int dispatch(const struct call_frame *frame, struct part part) {
    const char *name = ((const struct array *)frame->attributes.values[0])->data;
    const struct array *operands = frame->attributes.values[1];
    const int64_t *word = operands->data, *end = word + operands->size;
    uint64_t stack[MOST_OPERANDS];
    int count = 0, optional = 0, failed = 0; /* what is given is not released then: the step ends */
    while (word < end && !failed) {
        struct operand operand;
        void *given = NULL;
        word = next_operand(word, &operand);
        const int64_t *words = operand.words;
        switch (operand.entry) {
        case OPTIONAL: optional = 1; continue;
        case GIVEN_NONE: break;
        case GIVEN_NUMBER: given = (void *)(uintptr_t)words[0]; break;
        case GIVEN_LIST:
            given = list_of(words);
            failed = given == NULL;
            break;
        default: {
            struct range range = {part.cut == NOT ? -1 : (int)words[3], part.from, part.to};
            given = lent_as(array_of(frame, operand), (struct kind){(int32_t)words[1], words[2]}, range, ALL, ROWS);
            failed = given == NULL;
        }
        }
        if (optional) {
            given = memcpy(torch_.new(sizeof(uint64_t)), &given, sizeof given);
            optional = 0;
        }
        failed |= count == MOST_OPERANDS;
        if (!failed) {
            stack[count++] = (uint64_t)(uintptr_t)given;
        }
    }
    if (failed) {
        return 1;
    }
    uint64_t control = set_exact(EXACT);
    failed = torch_.call(name, name + strlen(name) + 1, stack, VERSION); /* which consumes what the stack holds */
    set_exact(control);
    for (int64_t i = 0; !failed && i < frame->results.count; i++) { /* it returns the results once more */
        torch_.delete((tensor)(uintptr_t)stack[i]);
    }
    return failed;
}

/* The one attribute of an elementwise program: how many of the arguments are arrays (single numbers follow them), how many
 * numbers its instructions read, how many instructions compute numbers; among what is given and computed, the places of
 * the numbers that are read and of those that are results; the instructions of numbers, then those of blocks. A share is a
 * range of blocks. Each computes all numbers; the first writes those that are results, whose memory is their own. */
static int run_pointwise(const struct call_frame *frame, struct part part) {
    const struct array *attribute = frame->attributes.values[0];
    const int64_t *words = attribute->data;
    struct buffer **arguments = (struct buffer **)frame->arguments.buffers;
    struct buffer **results = (struct buffer **)frame->results.buffers;
    float *read[MOST_ARRAYS], *written[MOST_ARRAYS], singles[MOST_ARRAYS];
    double numbers[MOST_NUMBERS];
    int64_t arrays = words[0], singles_read = words[1], computed = words[2], given = frame->arguments.count - arrays, blocks = 0;
    while (blocks < frame->results.count && results[blocks]->rank > 0) {
        blocks++;
    }
    int64_t made = frame->results.count - blocks;
    const int64_t *places = words + 3;
    const struct number_instruction *of_numbers = (const struct number_instruction *)(places + singles_read + made);
    if (arrays > MOST_ARRAYS || singles_read > MOST_ARRAYS || blocks > MOST_ARRAYS || given + computed > MOST_NUMBERS) {
        return 1;
    }
    for (int64_t i = 0; i < arrays; i++) {
        read[i] = arguments[i]->data;
    }
    uint64_t control = set_exact(EXACT); /* for the numbers: blocks are flushed to zero as by XLA's loops */
    for (int64_t i = 0; i < given; i++) {
        const struct buffer *number = arguments[arrays + i];
        numbers[i] = number->dtype == F64 ? *(const double *)number->data : *(const float *)number->data;
    }
    compute_numbers(of_numbers, computed, numbers, given);
    for (int64_t i = 0; i < singles_read; i++) {
        singles[i] = (float)numbers[places[i]];
    }
    for (int64_t i = 0; i < blocks; i++) {
        written[i] = results[i]->data;
    }
    for (int64_t i = 0; part.from == 0 && i < made; i++) {
        const struct buffer *number = results[blocks + i];
        double value = numbers[places[singles_read + i]];
        if (number->dtype == F64) {
            *(double *)number->data = value;
        } else {
            *(float *)number->data = (float)value;
        }
    }
    set_exact(control);
    int64_t end = elements(results[0]), from = part.from * BLOCK, to = part.to * BLOCK;
    const struct instruction *program = (const struct instruction *)(of_numbers + computed);
    int length = (int)((const struct instruction *)(words + attribute->size) - program);
    run_blocks(program, length, (struct arrays){read, written, singles}, from, to < end ? to : end);
    return 0;
}

static int64_t channel_length(const struct buffer *buffer) {
    return elements(buffer) / (buffer->dims[0] * buffer->dims[1]);
}

/* Attributes: which of weight, bias and the running statistics are given, then eps and the momentum. */
static int normalize(const struct call_frame *frame, struct part part) {
    const int64_t *given = ((const struct array *)frame->attributes.values[0])->data;
    const double *numbers = ((const struct array *)frame->attributes.values[1])->data;
    struct buffer **next = (struct buffer **)frame->arguments.buffers;
    struct buffer **results = (struct buffer **)frame->results.buffers;
    const struct buffer *x = *next++;
    struct batch_norm norm = {x->dtype == BF16, x->dims[0],       x->dims[1], channel_length(x),
                              numbers[0],       numbers[1],       x->data,    results[0]->data};
    norm.weight = given[0] ? (*next++)->data : NULL;
    norm.bias = given[1] ? (*next++)->data : NULL;
    norm.mean = results[1]->data;
    norm.rstd = results[2]->data;
    if (given[2]) {
        norm.running_mean = next[0]->data;
        norm.running_var = next[1]->data;
        norm.new_running_mean = results[3]->data;
        norm.new_running_var = results[4]->data;
    }
    batch_norm(&norm, part.from, part.to);
    return 0;
}

/* The arguments are the gradient of the output, the input, the mean, the inverse deviation, and maybe the weight. */
static int normalize_backward(const struct call_frame *frame, struct part part) {
    struct buffer **given = (struct buffer **)frame->arguments.buffers;
    struct buffer **results = (struct buffer **)frame->results.buffers;
    const struct buffer *x = given[1];
    const float *weight = frame->arguments.count > 4 ? given[4]->data : NULL;
    struct batch_norm_backward norm = {
        x->dtype == BF16, x->dims[0], x->dims[1], channel_length(x), given[0]->data, x->data, results[0]->data,
        given[2]->data, given[3]->data, weight, results[1]->data, results[2]->data};
    batch_norm_backward(&norm, part.from, part.to);
    return 0;
}

/* The first attribute of a normalization of rows: whether they are centered, the number of groups, and the elements of each
 * channel, or 0; then what is given and wanted. */
static const int64_t *form_of(const struct call_frame *frame) {
    return ((const struct array *)frame->attributes.values[0])->data;
}

static struct rows rows_of(const struct call_frame *frame, const struct buffer *x) {
    const int64_t *form = form_of(frame);
    return (struct rows){x->dims[0], x->dims[1], form[1], form[2] == 0 ? 0 : x->dims[1] / form[2], form[2], (int)form[0]};
}

/* The attribute goes on with whether weight and bias are given; the second is eps. */
static int normalize_rows(const struct call_frame *frame, struct part part) {
    const int64_t *given = form_of(frame) + 2;
    const double *eps = ((const struct array *)frame->attributes.values[1])->data;
    struct buffer **next = (struct buffer **)frame->arguments.buffers;
    struct buffer **made = (struct buffer **)frame->results.buffers;
    const struct buffer *x = *next++;
    struct row_norm norm = {x->dtype == BF16, rows_of(frame, x), *eps, x->data, (*made++)->data};
    norm.weight = given[1] ? (*next++)->data : NULL;
    norm.bias = given[2] ? (*next++)->data : NULL;
    norm.rstd = (*made++)->data;
    norm.mean = norm.rows.centered ? (*made)->data : NULL;
    row_norm(&norm, part.from, part.to);
    return 0;
}

/* The arguments are the gradient of the output, the input, the inverse deviation, and maybe the mean and the weight.
 * The attribute goes on with whether the weight is given, and the derivatives by input, weight and bias are wanted. */
static int normalize_rows_backward(const struct call_frame *frame, struct part part, int of_vectors) {
    const int64_t *given = form_of(frame) + 2;
    struct buffer **next = (struct buffer **)frame->arguments.buffers;
    struct buffer **made = (struct buffer **)frame->results.buffers;
    struct row_norm_backward norm = {next[1]->dtype == BF16, rows_of(frame, next[1])};
    norm.g = (*next++)->data;
    norm.x = (*next++)->data;
    norm.rstd = (*next++)->data;
    norm.mean = norm.rows.centered ? (*next++)->data : NULL;
    norm.weight = given[1] ? (*next)->data : NULL;
    norm.of_x = given[2] ? (*made++)->data : NULL;
    norm.of_weight = given[3] ? (*made++)->data : NULL;
    norm.of_bias = given[4] ? (*made)->data : NULL;
    if (of_vectors) {
        row_norm_sums(&norm, part.from, part.to);
    } else {
        row_norm_backward(&norm, part.from, part.to);
    }
    return 0;
}

/* The arguments are the key and the first counter; the one attribute is whether both words of each hash are wanted. A share
 * is a range of blocks. */
static int64_t hashes(const struct call_frame *frame) {
    const int64_t *words = ((const struct array *)frame->attributes.values[0])->data;
    return elements(frame->results.buffers[0]) / (*words ? 2 : 1);
}

static int draw(const struct call_frame *frame, struct part part) {
    const int64_t *words = ((const struct array *)frame->attributes.values[0])->data;
    struct buffer **given = (struct buffer **)frame->arguments.buffers;
    const struct buffer *result = frame->results.buffers[0];
    enum form form = *words                   ? WORDS
                     : result->dtype == U8  ? WIDTH_8
                     : result->dtype == U16 ? WIDTH_16
                     : result->dtype == U32 ? WIDTH_32
                                            : WIDTH_64;
    int64_t end = hashes(frame), to = part.to * HASHES;
    random_bits(given[0]->data, *(const uint32_t *)given[1]->data, form, result->data, part.from * HASHES,
                to < end ? to : end);
    return 0;
}

/* --- A call, in shares --- */

enum operation {
    FORWARD,
    BACKWARD,
    PRODUCT,
    ATTENTION,
    ATTENTION_BACKWARD,
    DISPATCH,
    POINTWISE, /* from here on, no code of PyTorch's */
    NORM,
    NORM_BACKWARD,
    ROW_NORM,
    ROW_NORM_BACKWARD,
    DRAW
};

struct call {
    struct call_frame frame; /* a copy: XLA's own is gone when the handler returns, what it points to is kept */
    const char *message;     /* if it fails */
    struct how how;          /* of a convolution */
    struct pieces pieces[2]; /* most have the first; backward the second is of the weight's */
    enum operation operation;
    int64_t threads, shares;
    int64_t needed; /* so many helpers must not all refuse */
    atomic_long next, failed, refused;
    int64_t done, users; /* under the lock */
    void *future;        /* under the lock; NULL while the handler has not returned */
    pthread_mutex_t lock;
    pthread_cond_t all_done;
};

static int share(const struct call *call, int64_t number) {
    const struct call_frame *frame = &call->frame;
    int64_t first = call->pieces[0].shares;
    if (number >= first) {
        struct part part = part_of(call->pieces[1], number - first);
        return call->operation == BACKWARD ? gradient(frame, call->how, part, 1, first > 0)
                                           : normalize_rows_backward(frame, part, 1);
    }
    struct part part = part_of(call->pieces[0], number);
    switch (call->operation) {
    case FORWARD: return convolve(frame, call->how, part);
    case BACKWARD: return gradient(frame, call->how, part, 0, 0);
    case PRODUCT: return multiply(frame, part);
    case ATTENTION: return attend(frame, part, 0);
    case ATTENTION_BACKWARD: return attend(frame, part, 1);
    case DISPATCH: return dispatch(frame, part);
    case POINTWISE: return run_pointwise(frame, part);
    case NORM: return normalize(frame, part);
    case NORM_BACKWARD: return normalize_backward(frame, part);
    case ROW_NORM: return normalize_rows(frame, part);
    case ROW_NORM_BACKWARD: return normalize_rows_backward(frame, part, 0);
    case DRAW: return draw(frame, part);
    }
    return 1;
}

static void leave(struct call *call) {
    pthread_mutex_lock(&call->lock);
    int last = --call->users == 0;
    pthread_mutex_unlock(&call->lock);
    if (last) {
        pthread_mutex_destroy(&call->lock);
        pthread_cond_destroy(&call->all_done);
        free(call);
    }
}

static void *error_of(const struct call_frame *frame, const char *message) {
    struct error_arguments error = {sizeof error, NULL, message, INTERNAL};
    return frame->api->create_error(&error);
}

/* Takes shares until none is left. Who comes late finds none, and touches nothing but the call. If the handler has returned,
 * who finishes the last share tells XLA, which goes on in this thread. */
static void *take_shares(void *data) {
    struct call *call = data;
    int64_t number, mine = 0;
    while ((number = atomic_fetch_add(&call->next, 1)) < call->shares) {
        int before = torch_.get_threads(); /* sets it, too, the first time in a thread */
        torch_.set_threads(1);
        int mkl = torch_.set_mkl_threads == NULL ? 0 : torch_.set_mkl_threads(1);
        if (share(call, number)) {
            if (torch_.what != NULL) {
                fprintf(stderr, "PyTorch: %s\n", torch_.what());
            }
            atomic_store(&call->failed, 1);
        }
        torch_.set_threads(before);
        if (torch_.set_mkl_threads != NULL) {
            torch_.set_mkl_threads(mkl);
        }
        mine++;
    }
    pthread_mutex_lock(&call->lock);
    call->done += mine;
    int last = mine > 0 && call->done == call->shares;
    void *future = last ? call->future : NULL;
    if (last) {
        pthread_cond_signal(&call->all_done);
    }
    pthread_mutex_unlock(&call->lock);
    const struct api *api = call->frame.api;
    void *error = future != NULL && atomic_load(&call->failed) ? error_of(&call->frame, call->message) : NULL;
    leave(call);
    if (error != NULL) {
        api->fail_future(&(struct complete_future_arguments){sizeof(struct complete_future_arguments), NULL, future, error});
    } else if (future != NULL) {
        size_t size = offsetof(struct complete_future_arguments, error);
        api->complete_future(&(struct complete_future_arguments){size, NULL, future, NULL});
    }
    return NULL;
}

/* One helper less; where nobody is left, a thread of its own does it all. */
static void refuse(struct call *call) {
    pthread_t thread;
    if (atomic_fetch_add(&call->refused, 1) + 1 < call->needed) {
        leave(call);
    } else if (pthread_create(&thread, NULL, take_shares, call) == 0) {
        pthread_detach(thread);
    } else {
        take_shares(call);
    }
}

/* A thread of Python's takes no shares: PyTorch's modes, which are the thread's own, would see the operation. */
static void help(void *call) {
    if (torch_.python_thread() != NULL) {
        refuse(call);
    } else {
        take_shares(call);
    }
}

/* Has all shares done, by this thread and those of XLA that are free. While others are still at work, the handler returns:
 * this thread is free for what else XLA has to compute. A thread of Python's that runs XLA waits for it there. */
static void *run(struct call *call, struct call_frame *frame) {
    const struct api *api = frame->api;
    int python = torch_.python_thread() != NULL;
    int64_t helpers = (call->shares < call->threads ? call->shares : call->threads) - !python;
    call->users = helpers + 1 + !python;
    call->needed = python ? helpers : INT64_MAX;
    pthread_mutex_init(&call->lock, NULL);
    pthread_cond_init(&call->all_done, NULL);
    for (int64_t i = 0; i < helpers; i++) {
        struct schedule_arguments schedule = {sizeof schedule, NULL, frame->context, help, call};
        if (api->schedule(&schedule) != NULL) {
            refuse(call);
        }
    }
    if (!python) {
        take_shares(call);
    }
    pthread_mutex_lock(&call->lock);
    if (call->done < call->shares && api->size >= sizeof *api) {
        struct create_future_arguments create = {sizeof create, NULL, NULL};
        if (api->create_future(&create) == NULL) {
            frame->future = call->future = create.future;
        }
    }
    while (call->done < call->shares && call->future == NULL) {
        pthread_cond_wait(&call->all_done, &call->lock);
    }
    int failed = call->future == NULL && atomic_load(&call->failed) != 0;
    const char *message = call->message;
    pthread_mutex_unlock(&call->lock);
    leave(call);
    return failed ? error_of(frame, message) : NULL;
}

static struct call *new_call(const struct call_frame *frame, enum operation operation) {
    struct call *call = calloc(1, sizeof *call);
    if (call != NULL) {
        struct count_arguments count = {sizeof count, NULL, frame->context, &call->threads};
        if (frame->api->count_threads(&count) != NULL) {
            call->threads = 1;
        }
        call->frame = *frame;
        call->operation = operation;
        if (operation < PRODUCT) {
            call->how = how_of(frame);
        }
    }
    return call;
}

static struct call *forward(const struct call_frame *frame) {
    const struct buffer *x = frame->arguments.buffers[0], *w = frame->arguments.buffers[1];
    const struct buffer *y = frame->results.buffers[0];
    int64_t batch = x->dims[0];
    struct call *call = new_call(frame, FORWARD);
    if (call == NULL) {
        return NULL;
    }
    call->pieces[0] = best_cut(batch, channels(y), OUT, elements(w) <= elements(x), &call->how, call->threads,
                               least_samples(x));
    call->shares = call->pieces[0].shares;
    return call;
}

/* Gives the gradient of the input, that of the weight, or both: which, is the second attribute. */
static struct call *backward(const struct call_frame *frame) {
    const int64_t *wanted = ((const struct array *)frame->attributes.values[1])->data;
    const struct buffer *g = frame->arguments.buffers[0], *x = frame->arguments.buffers[1];
    const struct buffer *w = frame->arguments.buffers[2];
    int64_t batch = x->dims[0];
    struct call *call = new_call(frame, BACKWARD);
    if (call == NULL) {
        return NULL;
    }
    if (wanted[0]) {
        call->pieces[0] = best_cut(batch, channels(x), IN, elements(w) <= elements(g), &call->how, call->threads,
                                   least_samples(x));
    }
    if (wanted[1]) { /* along its first dimension: a sum over the batch is one sum, however many threads there are */
        int transposed = call->how.transposed;
        call->pieces[1] = best_cut(1, channels(transposed ? x : g), transposed ? IN : OUT, 0, &call->how, call->threads, 1);
    }
    call->shares = call->pieces[0].shares + call->pieces[1].shares;
    return call;
}

enum { LEAST_LENGTH = 32 }; /* of a share of a product, in rows or columns */

/* A product of matrices, cut along the longer side of the result: all shares read the smaller one of the operands. A batch
 * of them is cut into smaller batches. */
static struct call *product(const struct call_frame *frame) {
    const struct buffer *result = frame->results.buffers[0];
    int64_t rows = result->dims[0], columns = result->dims[1];
    struct call *call = new_call(frame, PRODUCT);
    if (call == NULL) {
        return NULL;
    }
    if (result->rank == 3) {
        call->shares = rows < call->threads ? rows : call->threads;
        call->pieces[0] = (struct pieces){BATCH, rows, call->shares};
        return call;
    }
    int64_t longest = rows >= columns ? rows : columns, most = longest / LEAST_LENGTH;
    int64_t shares = most < call->threads ? most : call->threads;
    call->pieces[0] = shares > 1 ? (struct pieces){rows >= columns ? BATCH : OUT, longest, shares}
                                 : (struct pieces){NOT, 1, 1};
    call->shares = call->pieces[0].shares;
    return call;
}

/* Attention, cut by the batch, or by the heads of the keys, of which each is some of the queries'. */
static struct call *attention(const struct call_frame *frame, enum operation operation) {
    const struct buffer *key = frame->arguments.buffers[operation == ATTENTION ? 1 : 2];
    int64_t batch = key->dims[0], heads = key->dims[2];
    struct call *call = new_call(frame, operation);
    if (call == NULL) {
        return NULL;
    }
    int64_t by_batch = batch < call->threads ? batch : call->threads;
    int64_t by_heads = heads < call->threads ? heads : call->threads;
    call->pieces[0] = by_batch <= 1 && by_heads <= 1 ? (struct pieces){NOT, 1, 1}
                      : by_batch >= by_heads         ? (struct pieces){BATCH, batch, by_batch}
                                                     : (struct pieces){GROUPS, heads, by_heads};
    call->shares = call->pieces[0].shares;
    return call;
}

static struct call *attention_forward(const struct call_frame *frame) {
    return attention(frame, ATTENTION);
}

static struct call *attention_backward(const struct call_frame *frame) {
    return attention(frame, ATTENTION_BACKWARD);
}

/* Blocks of a share of an elementwise program, or of random bits; and up to how many the thread that calls runs at once:
 * helpers take 0.1 ms to come. */
enum { LEAST_BLOCKS = 16, FEW_BLOCKS = 64 };

static struct call *by_blocks(const struct call_frame *frame, enum operation operation, int64_t blocks) {
    struct call *call = new_call(frame, operation);
    if (call == NULL) {
        return NULL;
    }
    int64_t most = blocks <= FEW_BLOCKS ? 1 : (blocks + LEAST_BLOCKS - 1) / LEAST_BLOCKS;
    call->pieces[0] = (struct pieces){BATCH, blocks, most < call->threads ? most : call->threads};
    call->shares = call->pieces[0].shares;
    return call;
}

static struct call *pointwise(const struct call_frame *frame) {
    return by_blocks(frame, POINTWISE, (elements(frame->results.buffers[0]) + BLOCK - 1) / BLOCK);
}

static struct call *threefry(const struct call_frame *frame) {
    return by_blocks(frame, DRAW, (hashes(frame) + HASHES - 1) / HASHES);
}

enum { LEAST_ELEMENTS = 1 << 14 }; /* of a share of a normalization, which has some of the channels or rows */

/* The shares of an array with so many elements, in `length` pieces. */
static struct pieces by_elements(int64_t length, int64_t elements, int64_t threads) {
    int64_t most = elements / LEAST_ELEMENTS, shares = most < threads ? most : threads;
    shares = shares < length ? shares : length;
    return (struct pieces){OUT, length, shares > 1 ? shares : 1};
}

/* Cut along the dimension of its first array that may be cut. */
static struct call *dispatched(const struct call_frame *frame) {
    const struct array *operands = frame->attributes.values[1];
    const int64_t *word = operands->data;
    struct call *call = new_call(frame, DISPATCH);
    if (call == NULL) {
        return NULL;
    }
    struct operand operand;
    do {
        word = next_operand(word, &operand);
    } while (operand.entry != GIVEN_ARRAY);
    const struct buffer *array = array_of(frame, operand);
    int64_t along = operand.words[3];
    call->pieces[0] = along < 0 ? (struct pieces){NOT, 1, 1}
                                : by_elements(array->dims[along], elements(array), call->threads);
    call->shares = call->pieces[0].shares;
    return call;
}

/* Cut along a dimension of an argument: by channels or by rows. */
static struct call *cut_along(const struct call_frame *frame, enum operation operation, int argument, int dimension) {
    const struct buffer *x = frame->arguments.buffers[argument];
    struct call *call = new_call(frame, operation);
    if (call == NULL) {
        return NULL;
    }
    call->pieces[0] = by_elements(x->dims[dimension], elements(x), call->threads);
    call->shares = call->pieces[0].shares;
    return call;
}

static struct call *norm(const struct call_frame *frame) { return cut_along(frame, NORM, 0, 1); }

static struct call *norm_backward(const struct call_frame *frame) { return cut_along(frame, NORM_BACKWARD, 1, 1); }

static struct call *norm_of_rows(const struct call_frame *frame) { return cut_along(frame, ROW_NORM, 0, 0); }

static struct call *norm_of_rows_backward(const struct call_frame *frame) {
    const int64_t *given = form_of(frame) + 2;
    const struct buffer *x = frame->arguments.buffers[1];
    struct rows rows = rows_of(frame, x);
    struct call *call = new_call(frame, ROW_NORM_BACKWARD);
    if (call == NULL) {
        return NULL;
    }
    if (given[2]) {
        call->pieces[0] = by_elements(x->dims[0], elements(x), call->threads);
    }
    if (given[3] || given[4]) { /* by columns or channels: each is one sum, however many threads there are */
        int64_t sums = rows.repeat == 0 ? rows.length : rows.groups * rows.channels;
        call->pieces[1] = by_elements(sums, elements(x), call->threads);
    }
    call->shares = call->pieces[0].shares + call->pieces[1].shares;
    return call;
}

static void *handle(struct call_frame *frame, struct call *(*prepare)(const struct call_frame *), const char *message) {
    if (is_asked_for_version(frame->extension)) {
        return NULL;
    }
    struct call *call = prepare(frame);
    if (call == NULL) {
        return error_of(frame, message);
    }
    call->message = message;
    if (call->shares == 1 && call->operation >= POINTWISE) { /* no code of PyTorch's: this thread can run it at once */
        int failed = share(call, 0);
        free(call);
        return failed ? error_of(frame, message) : NULL;
    }
    return run(call, frame);
}

EXPORT void *firstloss_convolution(struct call_frame *frame) {
    return handle(frame, forward, "PyTorch's convolution failed; the line before this on stderr says why");
}

EXPORT void *firstloss_convolution_backward(struct call_frame *frame) {
    return handle(frame, backward, "PyTorch's convolution_backward failed; the line before this on stderr says why");
}

EXPORT void *firstloss_product(struct call_frame *frame) {
    return handle(frame, product, "PyTorch's product of matrices failed; the line before this on stderr says why");
}

EXPORT void *firstloss_attention(struct call_frame *frame) {
    return handle(frame, attention_forward, "PyTorch's attention failed; the line before this on stderr says why");
}

EXPORT void *firstloss_attention_backward(struct call_frame *frame) {
    return handle(frame, attention_backward,
                  "PyTorch's attention_backward failed; the line before this on stderr says why");
}

EXPORT void *firstloss_dispatch(struct call_frame *frame) {
    return handle(frame, dispatched, "an operation of PyTorch's failed; the line before this on stderr says why");
}

EXPORT void *firstloss_pointwise(struct call_frame *frame) {
    return handle(frame, pointwise, "an elementwise program has too many arrays");
}

EXPORT void *firstloss_batch_norm(struct call_frame *frame) { return handle(frame, norm, "out of memory"); }

EXPORT void *firstloss_batch_norm_backward(struct call_frame *frame) {
    return handle(frame, norm_backward, "out of memory");
}

EXPORT void *firstloss_row_norm(struct call_frame *frame) { return handle(frame, norm_of_rows, "out of memory"); }

EXPORT void *firstloss_row_norm_backward(struct call_frame *frame) {
    return handle(frame, norm_of_rows_backward, "out of memory");
}

EXPORT void *firstloss_threefry(struct call_frame *frame) { return handle(frame, threefry, "out of memory"); }

/* The mask of a dropout, for kernel_draws.py. */
EXPORT void firstloss_bernoulli(const uint32_t *seed, uint32_t draw, float p, uint8_t *out, int64_t from, int64_t to) {
    bernoulli(seed, draw, p, out, from, to);
}

/* Called once, before any other; `functions` in the order of the structure. */
EXPORT int firstloss_aten(void **functions, int count) {
    if ((size_t)count * sizeof(void *) != sizeof torch_) {
        return 1;
    }
    memcpy(&torch_, functions, sizeof torch_);
    return 0;
}
