/* Round numbers to a tensor's dtype and store them, on GPUs and, in the tests, on the CPU.
 *
 * Included after `rng/_arithmetic.h`, which computes the numbers.
 */

#ifdef __CUDACC__

#define FMA64(x, y, z) __fma_rn(x, y, z)
#define MUL64(x, y) __dmul_rn(x, y)

/* For each lane of a warp; their order between two SYNCs is undefined. */
#define LANES(lane) for (uint32_t lane = threadIdx.x & 31u, once_ = 1u; once_; once_ = 0u)
#define PER_LANE(type, name) type name
#define OF(name, lane) name
#define SYNC __syncwarp()
/* For each i below count, distributed over the threads of a block. */
#define EACH(i, count) for (uint32_t i = threadIdx.x; i < (count); i += blockDim.x)
#define SYNC_BLOCK __syncthreads()

#else

#include <math.h>

#define FMA64(x, y, z) __builtin_fma(x, y, z)
#define MUL64(x, y) ((double)((x) * (y)))

#define LANES(lane) for (uint32_t lane = 0; lane < 32u; lane++)
#define PER_LANE(type, name) type name[32]
#define OF(name, lane) name[lane]
#define SYNC
#define EACH(i, count) for (uint32_t i = 0; i < (count); i++)
#define SYNC_BLOCK

#endif

enum { UNIFORM = 0, NORMAL = 1 };
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3 };

/* Rounds to nearest, ties to even. */
FN uint16_t to_bfloat16(float x) {
    uint32_t bits = AS_BITS(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)0x7fc0u;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

FN float from_bfloat16(uint16_t x) {
    return AS_FLOAT((uint32_t)x << 16);
}

FN uint16_t to_float16(float x) {
    uint32_t bits = AS_BITS(x), sign = (bits >> 16) & 0x8000u, kept, left, half;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (bits >= 0x477ff000u) /* overflow: at least half an ulp above the largest */
        return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x33000001u) /* underflow: at most half of the smallest */
        return (uint16_t)sign;
    if (bits < 0x38800000u) { /* subnormal */
        uint32_t shift = 126u - (bits >> 23), whole = (bits & 0x7fffffu) | 0x800000u;
        kept = whole >> shift;
        left = whole & ((1u << shift) - 1u);
        half = 1u << (shift - 1u);
    } else {
        kept = (bits - 0x38000000u) >> 13;
        left = bits & 0x1fffu;
        half = 0x1000u;
    }
    kept += left > half || (left == half && (kept & 1u));
    return (uint16_t)(sign | kept);
}

FN float from_float16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, rest = x & 0x7fffu;
    if (rest >= 0x7c00u)
        return AS_FLOAT(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
    if (rest >= 0x400u)
        return AS_FLOAT(sign | ((rest << 13) + 0x38000000u));
    return AS_FLOAT(sign | AS_BITS(MUL((float)rest, 5.9604644775390625e-8f)));
}

/* Rounded to a dtype, as a float. */
FN float rounded(float x, uint32_t dtype) {
    return dtype == BFLOAT16 ? from_bfloat16(to_bfloat16(x)) : dtype == FLOAT16 ? from_float16(to_float16(x)) : x;
}

/* -- the CPU's uniforms ----------------------------------------------------------------------------------------- */

/* A uniform of [low, high); one that is rounded up to `high` becomes `low`. */
FN float uniform(uint32_t word, uint32_t bits, float low, float high, float range, uint32_t dtype) {
    float x = rounded(FMA(unit(word, bits), range, low), dtype);
    return x == rounded(high, dtype) ? rounded(low, dtype) : x;
}

FN double uniform_double(uint32_t first, uint32_t second, double low, double high) {
    uint64_t bits = ((uint64_t)first << 32 | second) & 0x1fffffffffffffULL;
    double x = FMA64(MUL64((double)(int64_t)bits, 1.1102230246251565e-16), high - low, low);
    return x == high ? low : x;
}

/* -- stores ----------------------------------------------------------------------------------------------------- */

/* The elements of a fill to write, and where. Elements of [low, high) are written: if `row` is 0, to out[e - low]; else
 * only the columns [column, column + width) of rows of that length, as a contiguous block of rows of length `width`. */
struct slice {
    uint64_t out, low, high, row, column, width;
};

/* The index in `out` of an element; -1 if it is not written. */
FN int64_t output_index(const struct slice *slice, uint64_t element) {
    if (element < slice->low || element >= slice->high)
        return -1;
    if (!slice->row)
        return (int64_t)(element - slice->low);
    uint64_t row = element / slice->row, column = element - row * slice->row;
    if (column < slice->column || column >= slice->column + slice->width)
        return -1;
    return (int64_t)((row - slice->low / slice->row) * slice->width + (column - slice->column));
}

FN void store(const struct slice *slice, uint64_t element, float x, uint32_t dtype) {
    int64_t at = output_index(slice, element);
    if (at < 0)
        return;
    if (dtype == FLOAT32)
        ((float *)slice->out)[at] = x;
    else
        ((uint16_t *)slice->out)[at] = dtype == BFLOAT16 ? to_bfloat16(x) : to_float16(x);
}

FN void store_double(const struct slice *slice, uint64_t element, double x) {
    int64_t at = output_index(slice, element);
    if (at >= 0)
        ((double *)slice->out)[at] = x;
}
