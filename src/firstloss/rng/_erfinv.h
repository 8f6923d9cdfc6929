/* The inverse error function of float32 numbers, wherever there can be no doubt what it is in float32.
 *
 * PyTorch takes it from a math library whose results are the true ones rounded to nearest, or nearly so: where the
 * true one lies close to the middle between two floats, either may come out. Here it is worked out to some thousandths
 * of the distance of two floats; and where it lies within `doubt` of that distance from a middle, the number is left to
 * the caller, who has PyTorch's own. How far that is from the truth is for the caller to find out.
 *
 * erfinv(x) = x R(|x|). R is smooth but at 1; it has a polynomial of degree 6 in each of 32 intervals, which get
 * shorter towards 1, and of which 16 numbers find theirs at once: a table of 32 floats is two registers. The two
 * largest terms are sums of two floats each (T. J. Dekker, "A floating-point technique for extending the available
 * precision", Numerische Mathematik 18, 1971). |x| > 1 - 2^-8 is left to the caller as well.
 */

#ifndef FIRSTLOSS_ERFINV_H
#define FIRSTLOSS_ERFINV_H

#include <immintrin.h>

#include "_kernels.h"

#include "_erfinv_table.h"

#define FOR_16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))

#define OF(row) _mm512_permutex2var_ps(_mm512_load_ps(row), place, _mm512_load_ps(row + 16))

/* The inverse error functions of 16 numbers; `sure` is of which there is no doubt. */
FOR_16 FN __m512 inverse(__m512 x, __m512 room, __mmask16 *sure) {
    const __m512 size = _mm512_abs_ps(x);
    __m512 u = _mm512_sub_ps(_mm512_set1_ps(1.0f), size);
    *sure = _mm512_cmp_ps_mask(u, _mm512_set1_ps(0x1p-8f), _CMP_GE_OQ);
    u = _mm512_min_ps(u, _mm512_set1_ps(0x1.fffffep-1f));
    const __m512i place = _mm512_srli_epi32(_mm512_castps_si512(u), 21);
    const __m512 t = _mm512_sub_ps(size, OF(centre)); /* exact: the two are within a factor of two, or one is 0 */

    /* R = c0 + c1 t + t^2 (c2 + ...) = high + low */
    __m512 rest = _mm512_fmadd_ps(OF(c6), t, OF(c5));
    rest = _mm512_fmadd_ps(rest, t, OF(c4));
    rest = _mm512_fmadd_ps(rest, t, OF(c3));
    rest = _mm512_fmadd_ps(rest, t, OF(c2));
    const __m512 slope = OF(c1);
    const __m512 linear = _mm512_mul_ps(slope, t);
    const __m512 base = OF(c0);
    const __m512 high = _mm512_add_ps(base, linear);
    __m512 low = _mm512_fmadd_ps(rest, t, OF(c1_low));
    low = _mm512_fmadd_ps(low, t, OF(c0_low));
    low = _mm512_add_ps(low, _mm512_fmsub_ps(slope, t, linear));
    low = _mm512_add_ps(low, _mm512_add_ps(_mm512_sub_ps(base, high), linear));

    const __m512 product = _mm512_mul_ps(x, high);
    const __m512 more = _mm512_fmadd_ps(x, low, _mm512_fmsub_ps(x, high, product));
    const __m512 value = _mm512_add_ps(product, more);
    const __m512 away = _mm512_add_ps(_mm512_sub_ps(product, value), more); /* of the true value from the float */
    /* The power of two below |value|; 2^-24 of it is half the distance of the floats there. */
    const __m512 power = _mm512_and_ps(value, _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000)));
    *sure &= _mm512_cmp_ps_mask(_mm512_abs_ps(away), _mm512_mul_ps(power, room), _CMP_LT_OQ);
    *sure &= _mm512_cmp_ps_mask(power, _mm512_set1_ps(0x1p-64f), _CMP_GT_OQ);
    return value;
}

/* `x.erfinv_()` of `count` numbers, but for those in doubt: of them `left` gets the arguments and `where` the indices,
 * counted from `first`, and how many there are is returned. Both have room for count + 16. */
FOR_16 static int64_t inverses_16(
    float *x, int64_t count, float doubt, float *left, int32_t *where, int32_t first
) {
    const __m512 room = _mm512_set1_ps(0x1p-24f * (1.0f - 2.0f * doubt));
    __m512i index = _mm512_add_epi32(
        _mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    );
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += 16, index = _mm512_add_epi32(index, _mm512_set1_epi32(16))) {
        const __mmask16 there = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1u) : (__mmask16)0xffff;
        const __m512 before = _mm512_maskz_loadu_ps(there, x + i);
        __mmask16 sure;
        const __m512 value = inverse(before, room, &sure);
        const __mmask16 open = (__mmask16)(there & ~sure);
        _mm512_mask_storeu_ps(x + i, there, value);
        _mm512_storeu_ps(left + found, _mm512_maskz_compress_ps(open, before));
        _mm512_storeu_si512(where + found, _mm512_maskz_compress_epi32(open, index));
        found += __builtin_popcount(open);
    }
    return found;
}

#undef OF

#endif
