/* The loops of `_fill.c` in which most of its time is spent, on 16 lanes.
 *
 * The results are those of `_arithmetic.h`, bit for bit, with fewer instructions: factors that are powers of two are
 * folded into constants, which rounds nothing differently, and exponents and signs have instructions of their own. All
 * 2^24 uniforms are tested. Compilers do not find these instructions, and by themselves do not use all 16 lanes.
 */

#ifndef FIRSTLOSS_AVX512_H
#define FIRSTLOSS_AVX512_H

#include <immintrin.h>

#include "_kernels.h"

#define FOR_16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define ALL(x) _mm512_set1_ps(x)
#define ALL_BITS(x) _mm512_set1_epi32((int)(x))
#define SIGN ALL_BITS(0x80000000u)

enum { /* truth tables of _mm512_ternarylogic_epi32(a, b, c) */
    SELECT = 0xca,  /* a ? b : c */
    XOR_AND = 0x78, /* a ^ (b & c) */
};

/* `twist_all` of `_fill.c`; `words` is aligned to 64 bytes, and `count` is a multiple of 16. Whole registers are loaded and
 * shifted into place, since a load that straddles two recent stores waits for them. */
FOR_16 static void twist_16(uint32_t *words, int count) {
    enum { PERIOD = 624, MIDDLE = 397, BELOW = MIDDLE & ~15 };
    __m512i first = _mm512_load_si512(words), middle = _mm512_load_si512(words + BELOW);
    for (int i = 0; i < count; i += 16) {
        const __m512i after = _mm512_load_si512(words + i + 16), beyond = _mm512_load_si512(words + i + BELOW + 16);
        const __m512i second = _mm512_alignr_epi32(after, first, 1);
        const __m512i mixed = _mm512_srli_epi32(_mm512_ternarylogic_epi32(SIGN, first, second, SELECT), 1);
        const __m512i word = _mm512_xor_si512(mixed, _mm512_alignr_epi32(beyond, middle, MIDDLE - BELOW));
        const __mmask16 odd = _mm512_test_epi32_mask(second, ALL_BITS(1));
        _mm512_store_si512(words + i + PERIOD, _mm512_mask_xor_epi32(word, odd, word, ALL_BITS(0x9908b0dfu)));
        first = after;
        middle = beyond;
    }
}

/* The lowest 24 bits of the tempered words. */
FOR_16 FN __m512 tempered_16(__m512i y) {
    y = _mm512_xor_si512(y, _mm512_srli_epi32(y, 11));
    y = _mm512_ternarylogic_epi32(y, _mm512_slli_epi32(y, 7), ALL_BITS(0x9d2c5680u), XOR_AND);
    y = _mm512_ternarylogic_epi32(y, _mm512_slli_epi32(y, 15), ALL_BITS(0xefc60000u), XOR_AND);
    y = _mm512_xor_si512(y, _mm512_srli_epi32(y, 18));
    return _mm512_cvtepi32_ps(_mm512_and_si512(y, ALL_BITS(0xffffffu)));
}

/* -2 times `log_of`. */
FOR_16 FN __m512 minus_two_logs_16(__m512 x) {
    const __m512 mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_p5_1, _MM_MANT_SIGN_zero); /* of [0.5, 1) */
    const __mmask16 small = _mm512_cmp_ps_mask(mantissa, ALL(0.707106781186547524f), _CMP_LT_OQ);
    __m512 e = _mm512_getexp_ps(x); /* of a mantissa of [1, 2) */
    e = _mm512_mask_add_ps(e, (__mmask16)~small, e, ALL(1.0f));
    x = _mm512_sub_ps(mantissa, ALL(1.0f));
    x = _mm512_mask_add_ps(x, small, x, mantissa);
    const __m512 z = _mm512_mul_ps(x, x);
    __m512 y = ALL(-2.0f * 7.0376836292e-2f);
    y = _mm512_fmadd_ps(y, x, ALL(-2.0f * -1.1514610310e-1f));
    y = _mm512_fmadd_ps(y, x, ALL(-2.0f * 1.1676998740e-1f));
    y = _mm512_fmadd_ps(y, x, ALL(-2.0f * -1.2420140846e-1f));
    y = _mm512_fmadd_ps(y, x, ALL(-2.0f * 1.4249322787e-1f));
    y = _mm512_fmadd_ps(y, x, ALL(-2.0f * -1.6668057665e-1f));
    y = _mm512_fmadd_ps(y, x, ALL(-2.0f * 2.0000714765e-1f));
    y = _mm512_fmadd_ps(y, x, ALL(-2.0f * -2.4999993993e-1f));
    y = _mm512_fmadd_ps(y, x, ALL(-2.0f * 3.3333331174e-1f));
    y = _mm512_mul_ps(y, x);
    y = _mm512_fmadd_ps(y, z, _mm512_mul_ps(e, ALL(-2.0f * -2.12194440e-4f)));
    y = _mm512_add_ps(z, y);
    return _mm512_fmadd_ps(e, ALL(-2.0f * 0.693359375f), _mm512_fmadd_ps(x, ALL(-2.0f), y));
}

FOR_16 FN __m512 with_sign_16(__m512 x, __m512i sign) {
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(x), sign, SIGN, XOR_AND));
}

/* `sine_cosine`; quarters are half its octants. */
FOR_16 FN void sines_cosines_16(__m512 x, __m512 *sines, __m512 *cosines) {
    const __m512 quarters = _mm512_add_round_ps(
        _mm512_mul_ps(x, ALL(0.5f * 1.27323954473516f)), ALL(0.5f), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC
    );
    const __m512i quarter = _mm512_cvttps_epi32(quarters);
    const __m512 y = _mm512_cvtepi32_ps(quarter);
    x = _mm512_fmadd_ps(y, ALL(2.0f * -0.78515625f), x);
    x = _mm512_fmadd_ps(y, ALL(2.0f * -2.4187564849853515625e-4f), x);
    x = _mm512_fmadd_ps(y, ALL(2.0f * -3.77489497744594108e-8f), x);
    const __m512 z = _mm512_mul_ps(x, x);
    __m512 c = _mm512_fmadd_ps(ALL(2.443315711809948e-5f), z, ALL(-1.388731625493765e-3f));
    c = _mm512_fmadd_ps(c, z, ALL(4.166664568298827e-2f));
    c = _mm512_mul_ps(c, z);
    c = _mm512_fmadd_ps(c, z, _mm512_mul_ps(z, ALL(-0.5f)));
    c = _mm512_add_ps(c, ALL(1.0f));
    __m512 s = _mm512_fmadd_ps(ALL(-1.9515295891e-4f), z, ALL(8.3321608736e-3f));
    s = _mm512_fmadd_ps(s, z, ALL(-1.6666654611e-1f));
    s = _mm512_mul_ps(s, z);
    s = _mm512_fmadd_ps(s, x, x);
    const __mmask16 turned = _mm512_test_epi32_mask(quarter, ALL_BITS(1));
    *sines = with_sign_16(_mm512_mask_blend_ps(turned, s, c), _mm512_slli_epi32(quarter, 30));
    *cosines = with_sign_16(
        _mm512_mask_blend_ps(turned, c, s), _mm512_slli_epi32(_mm512_add_epi32(quarter, ALL_BITS(1)), 30)
    );
}

/* `normals_8` of `_fill.c`, two groups at a time: their radii in one register, their angles in another. */
FOR_16 static void normals_16(const uint32_t *words, float *out, int count, float mean, float std) {
    enum { LOWER_HALVES = 0x44, UPPER_HALVES = 0xee }; /* of two registers */
    for (int i = 0; i < count; i += 32) {
        const int both = i + 16 < count;
        const __m512i first = _mm512_loadu_si512(words + i), second = both ? _mm512_loadu_si512(words + i + 16) : first;
        const __m512 radii = tempered_16(_mm512_shuffle_i32x4(first, second, LOWER_HALVES));
        const __m512 angles = tempered_16(_mm512_shuffle_i32x4(first, second, UPPER_HALVES));
        const __m512 radius = _mm512_sqrt_ps(minus_two_logs_16(_mm512_fnmadd_ps(radii, ALL(0x1p-24f), ALL(1.0f))));
        __m512 sines, cosines;
        sines_cosines_16(_mm512_mul_ps(angles, ALL(0x1p-24f * 6.283185307179586f)), &sines, &cosines);
        cosines = _mm512_fmadd_ps(_mm512_mul_ps(radius, cosines), ALL(std), ALL(mean));
        sines = _mm512_fmadd_ps(_mm512_mul_ps(radius, sines), ALL(std), ALL(mean));
        _mm512_storeu_ps(out + i, _mm512_shuffle_f32x4(cosines, sines, LOWER_HALVES));
        if (both)
            _mm512_storeu_ps(out + i + 16, _mm512_shuffle_f32x4(cosines, sines, UPPER_HALVES));
    }
}

#undef SIGN
#undef ALL_BITS
#undef ALL

#endif
