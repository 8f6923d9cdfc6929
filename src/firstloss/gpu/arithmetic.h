/* The arithmetic of random fills, for GPUs and for the CPU: one source.
 *
 * NVRTC compiles it for the kernels (`nvrtc.py`), and a C compiler for the tests, where it is compared with PyTorch bit
 * for bit. So each rounding is written out: no operator on floats whose product a compiler might fuse with a sum. What
 * the numbers have to be is told in `rng/_fill.c`, which makes the same ones in vectors.
 */

#ifdef __CUDACC__

typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned short uint16_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;

#define FN static __device__ __forceinline__
#define FMA(x, y, z) __fmaf_rn(x, y, z)
#define MUL(x, y) __fmul_rn(x, y)
#define ADD(x, y) __fadd_rn(x, y)
#define SUB(x, y) __fsub_rn(x, y)
#define SQRT(x) __fsqrt_rn(x)
#define FMA64(x, y, z) __fma_rn(x, y, z)
#define MUL64(x, y) __dmul_rn(x, y)
#define AS_FLOAT(x) __uint_as_float(x)
#define AS_BITS(x) __float_as_uint(x)

/* A warp's lanes side by side: what they do between two SYNCs they do in any order. */
#define LANES(lane) for (uint32_t lane = threadIdx.x & 31u, once_ = 1u; once_; once_ = 0u)
#define PER_LANE(type, name) type name
#define OF(name, lane) name
#define SYNC __syncwarp()
/* A block's threads side by side. */
#define EACH(i, count) for (uint32_t i = threadIdx.x; i < (count); i += blockDim.x)
#define SYNC_BLOCK __syncthreads()

#else

#include <math.h>
#include <stdint.h>
#include <string.h>

#define FN static inline
#define FMA(x, y, z) __builtin_fmaf(x, y, z)
#define MUL(x, y) ((float)((x) * (y)))
#define ADD(x, y) ((float)((x) + (y)))
#define SUB(x, y) ((float)((x) - (y)))
#define SQRT(x) __builtin_sqrtf(x)
#define FMA64(x, y, z) __builtin_fma(x, y, z)
#define MUL64(x, y) ((double)((x) * (y)))

FN float AS_FLOAT(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

FN uint32_t AS_BITS(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

#define LANES(lane) for (uint32_t lane = 0; lane < 32u; lane++)
#define PER_LANE(type, name) type name[32]
#define OF(name, lane) name[lane]
#define SYNC
#define EACH(i, count) for (uint32_t i = 0; i < (count); i++)
#define SYNC_BLOCK

#endif

enum { UNIFORM = 0, NORMAL = 1 };
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3 };

/* Rounded to the nearest, to even between two: the upper half of a float. */
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
    if (bits >= 0x477ff000u) /* at least half of a place above the largest */
        return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x33000001u) /* at most half of the smallest: to even, which is zero */
        return (uint16_t)sign;
    if (bits < 0x38800000u) { /* what is made has no leading 1 */
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

/* As a tensor of this dtype keeps it. */
FN float rounded(float x, uint32_t dtype) {
    return dtype == BFLOAT16 ? from_bfloat16(to_bfloat16(x)) : dtype == FLOAT16 ? from_float16(to_float16(x)) : x;
}

/* -- the CPU's words -------------------------------------------------------------------------------------------- */

FN uint32_t twist(uint32_t first, uint32_t second) {
    uint32_t mixed = (first & 0x80000000u) | (second & 0x7fffffffu);
    return (mixed >> 1) ^ ((0u - (second & 1u)) & 0x9908b0dfu);
}

FN uint32_t temper(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

/* -- the CPU's numbers ------------------------------------------------------------------------------------------ */

/* A uniform of [0, 1), of so many of a word's lowest bits. */
FN float unit(uint32_t word, uint32_t bits) {
    return MUL((float)(int32_t)(word & ((1u << bits) - 1u)), AS_FLOAT((127u - bits) << 23));
}

/* A uniform of [low, high). What is rounded up to the end that is left out becomes the other one. */
FN float uniform(uint32_t word, uint32_t bits, float low, float high, float range, uint32_t dtype) {
    float x = rounded(FMA(unit(word, bits), range, low), dtype);
    return x == rounded(high, dtype) ? rounded(low, dtype) : x;
}

FN double uniform_double(uint32_t first, uint32_t second, double low, double high) {
    uint64_t bits = ((uint64_t)first << 32 | second) & 0x1fffffffffffffULL;
    double x = FMA64(MUL64((double)(int64_t)bits, 1.1102230246251565e-16), high - low, low);
    return x == high ? low : x;
}

/* The logarithm of x, which is 1 minus a uniform: 2^-24 <= x <= 1. */
FN float log_of(float x) {
    float e = (float)((int32_t)(AS_BITS(x) >> 23) - 126);
    x = AS_FLOAT((AS_BITS(x) & 0x007fffffu) | 0x3f000000u); /* now 0.5 <= x < 1 */
    uint32_t small = x < 0.707106781186547524f;
    float again = small ? x : 0.0f;
    x = ADD(SUB(x, 1.0f), again);
    e = SUB(e, small ? 1.0f : 0.0f);
    float z = MUL(x, x);
    float y = 7.0376836292e-2f;
    y = FMA(y, x, -1.1514610310e-1f);
    y = FMA(y, x, 1.1676998740e-1f);
    y = FMA(y, x, -1.2420140846e-1f);
    y = FMA(y, x, 1.4249322787e-1f);
    y = FMA(y, x, -1.6668057665e-1f);
    y = FMA(y, x, 2.0000714765e-1f);
    y = FMA(y, x, -2.4999993993e-1f);
    y = FMA(y, x, 3.3333331174e-1f);
    y = MUL(y, x);
    y = FMA(y, z, MUL(e, -2.12194440e-4f)); /* ln 2 in two parts: here the small one, */
    y = FMA(z, -0.5f, y);
    return FMA(e, 0.693359375f, ADD(x, y)); /* and here the one that few bits hold */
}

/* The sine and cosine of x, an angle of the circle: 0 <= x <= 2 pi. */
FN void sine_cosine(float x, float *sine, float *cosine) {
    uint32_t octant = (uint32_t)((int32_t)MUL(x, 1.27323954473516f) + 1) & ~1u; /* 4 / pi; the nearest even one */
    float y = (float)(int32_t)octant;
    /* Minus pi / 4 in three parts: what is left of x has lost no bits. */
    x = FMA(y, -0.78515625f, x);
    x = FMA(y, -2.4187564849853515625e-4f, x);
    x = FMA(y, -3.77489497744594108e-8f, x);
    float z = MUL(x, x);
    float c = 2.443315711809948e-5f;
    c = FMA(c, z, -1.388731625493765e-3f);
    c = FMA(c, z, 4.166664568298827e-2f);
    c = MUL(c, z);
    c = FMA(c, z, MUL(z, -0.5f));
    c = ADD(c, 1.0f);
    float s = -1.9515295891e-4f;
    s = FMA(s, z, 8.3321608736e-3f);
    s = FMA(s, z, -1.6666654611e-1f);
    s = MUL(s, z);
    s = FMA(s, x, x);
    uint32_t turned = (octant & 2u) != 0u;
    *sine = AS_FLOAT(AS_BITS(turned ? c : s) ^ (octant & 4u) << 29);
    *cosine = AS_FLOAT(AS_BITS(turned ? s : c) ^ ((octant + 2u) & 4u) << 29);
}

/* Two normals of two uniforms of [0, 1), as the CPU makes them. */
FN void box_muller(float first, float second, float mean, float std, float *cosines, float *sines) {
    float radius = SQRT(MUL(-2.0f, log_of(SUB(1.0f, first))));
    float sine, cosine;
    sine_cosine(MUL(6.283185307179586f, second), &sine, &cosine);
    *cosines = FMA(MUL(radius, cosine), std, mean);
    *sines = FMA(MUL(radius, sine), std, mean);
}

/* -- where the numbers go --------------------------------------------------------------------------------------- */

/* Which elements of a fill are wanted, and where. Written are those of [low, high): straight, where `row` is 0, as
 * out[e - low]; else only those columns of rows of that length, row after row, as a block of rows `width` long. */
struct slice {
    uint64_t out, low, high, row, column, width;
};

FN int64_t place(const struct slice *slice, uint64_t element) {
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
    int64_t at = place(slice, element);
    if (at < 0)
        return;
    if (dtype == FLOAT32)
        ((float *)slice->out)[at] = x;
    else
        ((uint16_t *)slice->out)[at] = dtype == BFLOAT16 ? to_bfloat16(x) : to_float16(x);
}

FN void store_double(const struct slice *slice, uint64_t element, double x) {
    int64_t at = place(slice, element);
    if (at >= 0)
        ((double *)slice->out)[at] = x;
}
