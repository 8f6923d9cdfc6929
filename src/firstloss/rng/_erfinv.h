/* The inverse error function in float32, except for arguments whose result is hard to round.
 *
 * PyTorch calls a math library whose results are almost correctly rounded: if the exact result is close to the midpoint
 * of two floats, either one may be returned. Here the result is computed to some thousandths of an ulp. Arguments whose
 * result is within `margin` ulp of a midpoint are left to the caller, who calls PyTorch's function. The caller has to
 * check that the margin covers the error of PyTorch's math library.
 *
 * erfinv(x) = x R(|x|). R is smooth except at 1; it is approximated by a polynomial of degree 6 on each of 32 intervals,
 * which get shorter towards 1. The coefficients are looked up for 16 numbers at once: a table of 32 floats fits into two
 * registers. The two largest terms are sums of two floats each (T. J. Dekker, "A floating-point technique for extending
 * the available precision", Numerische Mathematik 18, 1971). |x| > 1 - 2^-8 is left to the caller, too.
 */

#ifndef FIRSTLOSS_ERFINV_H
#define FIRSTLOSS_ERFINV_H

#include <immintrin.h>

#include "_avx512.h" /* for FOR_16 */

#include "_erfinv_table.h"

#define LOOK_UP(row) _mm512_permutex2var_ps(_mm512_load_ps(row), interval, _mm512_load_ps(row + 16))

/* The inverse error function of 16 numbers; `sure` marks those that are not hard cases. */
FOR_16 FN __m512 inverse(__m512 x, __m512 tolerance, __mmask16 *sure) {
    const __m512 size = _mm512_abs_ps(x);
    __m512 u = _mm512_sub_ps(_mm512_set1_ps(1.0f), size);
    *sure = _mm512_cmp_ps_mask(u, _mm512_set1_ps(0x1p-8f), _CMP_GE_OQ);
    u = _mm512_min_ps(u, _mm512_set1_ps(0x1.fffffep-1f));
    const __m512i interval = _mm512_srli_epi32(_mm512_castps_si512(u), 21);
    const __m512 t = _mm512_sub_ps(size, LOOK_UP(centre)); /* exact, by Sterbenz's lemma, or the centre is 0 */

    /* R = c0 + c1 t + t^2 (c2 + ...) = high + low */
    __m512 rest = _mm512_fmadd_ps(LOOK_UP(c6), t, LOOK_UP(c5));
    rest = _mm512_fmadd_ps(rest, t, LOOK_UP(c4));
    rest = _mm512_fmadd_ps(rest, t, LOOK_UP(c3));
    rest = _mm512_fmadd_ps(rest, t, LOOK_UP(c2));
    const __m512 slope = LOOK_UP(c1);
    const __m512 linear = _mm512_mul_ps(slope, t);
    const __m512 base = LOOK_UP(c0);
    const __m512 high = _mm512_add_ps(base, linear);
    __m512 low = _mm512_fmadd_ps(rest, t, LOOK_UP(c1_low));
    low = _mm512_fmadd_ps(low, t, LOOK_UP(c0_low));
    low = _mm512_add_ps(low, _mm512_fmsub_ps(slope, t, linear));
    low = _mm512_add_ps(low, _mm512_add_ps(_mm512_sub_ps(base, high), linear));

    const __m512 product = _mm512_mul_ps(x, high);
    const __m512 more = _mm512_fmadd_ps(x, low, _mm512_fmsub_ps(x, high, product));
    const __m512 value = _mm512_add_ps(product, more);
    const __m512 error = _mm512_add_ps(_mm512_sub_ps(product, value), more); /* of rounding to `value` */
    /* The power of two below |value|; 2^-24 of it is half an ulp. */
    const __m512 power = _mm512_and_ps(value, _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000)));
    *sure &= _mm512_cmp_ps_mask(_mm512_abs_ps(error), _mm512_mul_ps(power, tolerance), _CMP_LT_OQ);
    *sure &= _mm512_cmp_ps_mask(power, _mm512_set1_ps(0x1p-64f), _CMP_GT_OQ);
    return value;
}

/* `x.erfinv_()` on `count` numbers, except for hard cases: their arguments are written to `hard`, their indices, counted
 * from `first`, to `indices`, and their number is returned. Both buffers have count + 16 elements. */
FOR_16 static int64_t inverses_16(
    float *x, int64_t count, float margin, float *hard, int32_t *indices, int32_t first
) {
    const __m512 tolerance = _mm512_set1_ps(0x1p-24f * (1.0f - 2.0f * margin));
    __m512i index = _mm512_add_epi32(
        _mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    );
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += 16, index = _mm512_add_epi32(index, _mm512_set1_epi32(16))) {
        const __mmask16 active = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1u) : (__mmask16)0xffff;
        const __m512 argument = _mm512_maskz_loadu_ps(active, x + i);
        __mmask16 sure;
        const __m512 value = inverse(argument, tolerance, &sure);
        const __mmask16 unsure = (__mmask16)(active & ~sure);
        _mm512_mask_storeu_ps(x + i, active, value);
        _mm512_storeu_ps(hard + found, _mm512_maskz_compress_ps(unsure, argument));
        _mm512_storeu_si512(indices + found, _mm512_maskz_compress_epi32(unsure, index));
        found += __builtin_popcount(unsure);
    }
    return found;
}

#undef LOOK_UP

#endif
