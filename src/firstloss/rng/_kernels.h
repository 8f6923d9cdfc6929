/* What the kernels share: how they are inlined and exported, and a float's bits. */

#ifndef FIRSTLOSS_KERNELS_H
#define FIRSTLOSS_KERNELS_H

#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Inlined into each version of its caller, and compiled for the vectors of that one. */
#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))
#else
#define INLINE static inline
#define ALIGNED
#endif

INLINE float as_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

INLINE uint32_t as_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

#endif
