/* Arithmetic shared by all fills: by the C kernels (`_fill.c`, `_counter.c`, `_jump.c`) and by the GPU kernels
 * (`firstloss/gpu`), which NVRTC compiles.
 *
 * Each rounded operation is a macro: the bits depend on which operations are contracted to FMAs, so the compiler must
 * not decide it (in C: -ffp-contract=off). FMA is fused, as in PyTorch's kernels (see `_fill.c`), unless UNFUSED is
 * defined: then it is rounded twice, as in `counter.py`.
 */

#ifndef FIRSTLOSS_ARITHMETIC_H
#define FIRSTLOSS_ARITHMETIC_H

#ifdef __CUDACC__

#ifdef __CUDACC_RTC__ /* NVRTC has no standard headers */
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned short uint16_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#else
#include <stdint.h>
#endif

#define FN static __device__ __forceinline__
#define FMA(x, y, z) __fmaf_rn(x, y, z)
#define MUL(x, y) __fmul_rn(x, y)
#define ADD(x, y) __fadd_rn(x, y)
#define SUB(x, y) __fsub_rn(x, y)
#define SQRT(x) __fsqrt_rn(x)
#define AS_FLOAT(x) __uint_as_float(x)
#define AS_BITS(x) __float_as_uint(x)

#else

#include <stdint.h>
#include <string.h>

/* Inlined, so that it is vectorized for the target of each version of its caller. */
#if defined(__GNUC__)
#define FN static inline __attribute__((always_inline))
#else
#define FN static inline
#endif

#define MUL(x, y) ((float)((x) * (y)))
#define ADD(x, y) ((float)((x) + (y)))
#define SUB(x, y) ((float)((x) - (y)))
#define SQRT(x) __builtin_sqrtf(x)
#ifdef UNFUSED
#define FMA(x, y, z) ADD(MUL(x, y), z)
#else
#define FMA(x, y, z) __builtin_fmaf(x, y, z)
#endif

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

#endif

/* -- MT19937: see mt19937.py --------------------------------------------------------------------------------------- */

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

/* -- uniforms and normals ------------------------------------------------------------------------------------------ */

/* A uniform of [0, 1), from the lowest `bits` bits of a word. */
FN float unit(uint32_t word, uint32_t bits) {
    return MUL((float)(int32_t)(word & ((1u << bits) - 1u)), AS_FLOAT((127u - bits) << 23));
}

/* The logarithm of 2^-24 <= x <= 1 (Cephes, single/logf.c). */
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
    y = FMA(y, z, MUL(e, -2.12194440e-4f)); /* ln 2 is the sum of two constants: */
    y = FMA(z, -0.5f, y);
    return FMA(e, 0.693359375f, ADD(x, y)); /* this one is exact in few bits */
}

/* sin(x) and cos(x), |x| <= pi / 4 (Cephes, single/sinf.c); z is x * x. */
FN float sine_near_zero(float x, float z) {
    float s = -1.9515295891e-4f;
    s = FMA(s, z, 8.3321608736e-3f);
    s = FMA(s, z, -1.6666654611e-1f);
    s = MUL(s, z);
    return FMA(s, x, x);
}

FN float cosine_near_zero(float z) {
    float c = 2.443315711809948e-5f;
    c = FMA(c, z, -1.388731625493765e-3f);
    c = FMA(c, z, 4.166664568298827e-2f);
    c = MUL(c, z);
    c = FMA(c, z, MUL(z, -0.5f));
    return ADD(c, 1.0f);
}

/* The sine and cosine of 0 <= x <= 2 pi. */
FN void sine_cosine(float x, float *sine, float *cosine) {
    uint32_t octant = (uint32_t)((int32_t)MUL(x, 1.27323954473516f) + 1) & ~1u; /* x * 4 / pi, to the nearest even */
    float y = (float)(int32_t)octant;
    /* Cody-Waite reduction: pi / 4 is the sum of three constants. */
    x = FMA(y, -0.78515625f, x);
    x = FMA(y, -2.4187564849853515625e-4f, x);
    x = FMA(y, -3.77489497744594108e-8f, x);
    float z = MUL(x, x);
    float c = cosine_near_zero(z), s = sine_near_zero(x, z);
    uint32_t turned = (octant & 2u) != 0u;
    *sine = AS_FLOAT(AS_BITS(turned ? c : s) ^ (octant & 4u) << 29);
    *cosine = AS_FLOAT(AS_BITS(turned ? s : c) ^ ((octant + 2u) & 4u) << 29);
}

/* Two normals from two uniforms of [0, 1). (Box and Muller, "A Note on the Generation of Random Normal Deviates", Annals
 * of Mathematical Statistics 29(2), 1958.) */
FN void box_muller(float first, float second, float mean, float std, float *cosines, float *sines) {
    float radius = SQRT(MUL(-2.0f, log_of(SUB(1.0f, first))));
    float sine, cosine;
    sine_cosine(MUL(6.283185307179586f, second), &sine, &cosine);
    *cosines = FMA(MUL(radius, cosine), std, mean);
    *sines = FMA(MUL(radius, sine), std, mean);
}

#endif
