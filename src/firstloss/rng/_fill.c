/* Fills from PyTorch's CPU random stream, float32 and bfloat16, bit-identical to PyTorch's own kernels.
 *
 * The results are defined by ATen: `uniform_real` (ATen/core/TransformationHelper.h) and `normal_fill`
 * (ATen/native/cpu/DistributionTemplates.h), the latter with the logarithm, sine and cosine of
 * ATen/native/cpu/avx_mathfun.h. Those are the single precision polynomials of Cephes (S. L. Moshier, Cephes
 * Mathematical Library 2.2, 1992, single/logf.c and single/sinf.c) in the order of operations of J. Pommier's
 * sse_mathfun and G. Garberoglio's avx_mathfun. PyTorch's compiler contracts some multiplications and additions to
 * FMAs, which changes last bits. Which ones was found by experiment: exactly those that are FMA in `_arithmetic.h`. So
 * this file must be compiled with -ffp-contract=off.
 *
 * Why it is fast: ATen generates its words one at a time and passes over the tensor twice. Here thousands of words are
 * generated at a time and are transformed while they are in the L1 cache, in loops for 8 and for 16 lanes, between which
 * the caller chooses: the compiler's, or those of `_avx512.h`.
 *
 * Called through ctypes; no state except the caller's, so it is reentrant.
 */

#include "_kernels.h"

EXPORT int firstloss_lanes(void);

#if !defined(__x86_64__) || !defined(__GNUC__)

/* On other architectures PyTorch has other kernels. */
int firstloss_lanes(void) {
    return 0;
}

#else

#include "_avx512.h"
#include "_erfinv.h"

enum {
    N = 624,            /* words in a block */
    M = 397,            /* the recurrence's middle term */
    BLOCKS = 4,         /* generated at a time: with their uniforms, 22 KB of the L1 cache */
    CHUNK = BLOCKS * N, /* a multiple of 16 */
};

#define FOR_8 __attribute__((target("avx2,fma")))

/* A position in the stream, as in ATen's mt19937: the current block, and how many of its words have been drawn. Declared
 * in native.py, too. */
struct cursor {
    uint32_t words[N];
    uint32_t drawn;
};

/* -- words --------------------------------------------------------------------------------------------------------- */

/* The current block and those generated after it, the last of which becomes the current one. */
struct stream {
    ALIGNED uint32_t words[N + CHUNK];
    int current; /* where the current block begins */
    int drawn;   /* of its words */
};

FN void begin(struct stream *stream, const struct cursor *cursor) {
    memcpy(stream->words, cursor->words, sizeof cursor->words);
    stream->current = 0;
    stream->drawn = (int)cursor->drawn;
}

FN void end(const struct stream *stream, struct cursor *cursor) {
    memcpy(cursor->words, stream->words + stream->current, sizeof cursor->words);
    cursor->drawn = (uint32_t)stream->drawn;
}

/* The recurrence of mt19937.py, linear instead of in a ring buffer: a word depends on none of the 227 before it, so the
 * loop can be vectorized. */
FN void twist_all(uint32_t *words, int count) {
    for (int i = 0; i < count; i++)
        words[i + N] = words[i + M] ^ twist(words[i], words[i + 1]);
}

FOR_8 static void twist_8(uint32_t *words, int count) {
    twist_all(words, count);
}

/* The next `count` words, at most CHUNK, before tempering; valid until the next call. */
FN const uint32_t *draw(struct stream *stream, int count, int lanes) {
    const int first = stream->drawn;
    const int blocks = (first + count - 1) / N;
    if (stream->current > 0)
        memcpy(stream->words, stream->words + stream->current, N * sizeof *stream->words);
    (lanes == 16 ? twist_16 : twist_8)(stream->words, blocks * N);
    stream->current = blocks * N;
    stream->drawn = first + count - stream->current;
    return stream->words + first;
}

/* -- uniforms and normals of words --------------------------------------------------------------------------------- */

/* As many normals as words, in groups of 16: eight words for the radii, then eight for the angles. */
FOR_8 static void normals_8(const uint32_t *restrict words, float *restrict out, int count, float mean, float std) {
    ALIGNED float uniforms[CHUNK];
    for (int i = 0; i < count; i++)
        uniforms[i] = unit(temper(words[i]), 24);
    for (int i = 0; i < count; i += 16) {
        for (int j = i; j < i + 8; j++) {
            float cosine, sine;
            box_muller(uniforms[j], uniforms[j + 8], mean, std, &cosine, &sine);
            out[j] = cosine;
            out[j + 8] = sine;
        }
    }
}

FN void normals(const uint32_t *words, float *out, int count, float mean, float std, int lanes) {
    (lanes == 16 ? normals_16 : normals_8)(words, out, count, mean, std);
}

/* Uniforms of [low, high). */
FN void uniforms_of(const uint32_t *restrict words, float *restrict out, int count, float low, float high) {
    for (int i = 0; i < count; i++) {
        float value = FMA(unit(temper(words[i]), 24), high - low, low);
        out[i] = value == high ? low : value; /* rounded up to the excluded end */
    }
}

FOR_8 static void uniforms_8(const uint32_t *restrict words, float *restrict out, int count, float low, float high) {
    uniforms_of(words, out, count, low, high);
}

FOR_16 static void uniforms_16(const uint32_t *restrict words, float *restrict out, int count, float low, float high) {
    uniforms_of(words, out, count, low, high);
}

FN void uniforms(const uint32_t *words, float *out, int count, float low, float high, int lanes) {
    (lanes == 16 ? uniforms_16 : uniforms_8)(words, out, count, low, high);
}

/* -- fills --------------------------------------------------------------------------------------------------------- */

FN int at_most_chunk(int64_t count) {
    return count < CHUNK ? (int)count : CHUNK;
}

FN void fill_normal(struct cursor *cursor, float *out, int64_t count, float mean, float std, int lanes) {
    struct stream stream;
    begin(&stream, cursor);
    int64_t done = 0;
    for (int64_t whole = count & ~(int64_t)15; done < whole;) {
        const int some = at_most_chunk(whole - done);
        normals(draw(&stream, some, lanes), out + done, some, mean, std, lanes);
        done += some;
    }
    if (done < count) {
        /* ATen draws uniforms for the ragged end, too, and then redraws the last 16. */
        draw(&stream, (int)(count - done), lanes);
        normals(draw(&stream, 16, lanes), out + count - 16, 16, mean, std, lanes);
    }
    end(&stream, cursor);
}

FN void fill_uniform(struct cursor *cursor, float *out, int64_t count, float low, float high, int lanes) {
    struct stream stream;
    begin(&stream, cursor);
    for (int64_t done = 0; done < count;) {
        const int some = at_most_chunk(count - done);
        uniforms(draw(&stream, some, lanes), out + done, some, low, high, lanes);
        done += some;
    }
    end(&stream, cursor);
}

/* The outputs of a fill whose rows are split by columns into parts. */
struct columns {
    char *const *out;       /* the memory of each part, whose rows are contiguous */
    const int64_t *widths;  /* the row length of each part */
    int parts;
    int rounded;            /* whether to round to bfloat16 */
};

FN uint16_t to_bfloat16(float x) {
    const uint32_t bits = AS_BITS(x);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16); /* to nearest, ties to even; not for NaN */
}

/* Round to bfloat16. A uniform that is rounded up to `high`, which is excluded, becomes `low`: ATen compares again after
 * this rounding. */
FN void round_all(const float *restrict from, uint16_t *restrict to, int count, int normal, float low, float high) {
    const uint16_t begin = to_bfloat16(low), end = to_bfloat16(high);
    for (int i = 0; i < count; i++) {
        const uint16_t x = to_bfloat16(from[i]);
        to[i] = !normal && x == end ? begin : x;
    }
}

FOR_8 static void round_8(const float *restrict from, uint16_t *restrict to, int count, int normal, float low, float high) {
    round_all(from, to, count, normal, low, high);
}

FOR_16 static void round_16(const float *restrict from, uint16_t *restrict to, int count, int normal, float low, float high) {
    round_all(from, to, count, normal, low, high);
}

FN void fill_columns(
    struct cursor *cursor, const struct columns *to, int64_t count, int normal, float first, float second, int lanes
) {
    ALIGNED float drawn[CHUNK];
    ALIGNED uint16_t rounded[CHUNK];
    struct stream stream;
    const char *from = to->rounded ? (const char *)rounded : (const char *)drawn;
    const size_t size = to->rounded ? sizeof *rounded : sizeof *drawn;
    begin(&stream, cursor);
    int part = 0;
    int64_t row = 0, column = 0; /* of the part */
    for (int64_t done = 0; done < count;) {
        const int some = at_most_chunk(count - done);
        const uint32_t *words = draw(&stream, some, lanes);
        if (normal)
            normals(words, drawn, some, first, second, lanes);
        else
            uniforms(words, drawn, some, first, second, lanes);
        if (to->rounded)
            (lanes == 16 ? round_16 : round_8)(drawn, rounded, some, normal, first, second);
        for (int taken = 0; taken < some;) {
            const int64_t width = to->widths[part];
            const int64_t next = width - column < some - taken ? width - column : some - taken;
            memcpy(to->out[part] + (row * width + column) * (int64_t)size, from + (size_t)taken * size, (size_t)next * size);
            taken += (int)next;
            column += next;
            if (column == width) {
                column = 0;
                if (++part == to->parts) {
                    part = 0;
                    row++;
                }
            }
        }
        done += some;
    }
    end(&stream, cursor);
}

/* Multiply, add, clamp: the epilogue of a fill. Each operation is rounded separately; NaN is preserved. Non-temporal
 * stores avoid reading the destination into the cache. */
FN float mul_add_clamp(float x, float factor, float term, float low, float high) {
    x = x * factor;
    x = x + term;
    x = x < low ? low : x;
    return x > high ? high : x;
}

#define MUL_ADD_CLAMP(LANES, VECTOR, PREFIX)                                                                           \
    int64_t i = 0;                                                                                                     \
    for (; i < count && ((uintptr_t)(to + i) & (LANES * sizeof(float) - 1)); i++)                                      \
        to[i] = mul_add_clamp(from[i], factor, term, low, high);                                                       \
    for (; i + LANES <= count; i += LANES) {                                                                           \
        VECTOR x = PREFIX##_loadu_ps(from + i);                                                                        \
        x = PREFIX##_add_ps(PREFIX##_mul_ps(x, PREFIX##_set1_ps(factor)), PREFIX##_set1_ps(term));                     \
        x = PREFIX##_max_ps(PREFIX##_set1_ps(low), x); /* returns the second operand if either is NaN */               \
        PREFIX##_stream_ps(to + i, PREFIX##_min_ps(PREFIX##_set1_ps(high), x));                                        \
    }                                                                                                                  \
    for (; i < count; i++)                                                                                             \
        to[i] = mul_add_clamp(from[i], factor, term, low, high);                                                       \
    _mm_sfence();

FOR_8 static void mul_add_clamp_8(
    float *to, const float *from, int64_t count, float factor, float term, float low, float high
) {
    MUL_ADD_CLAMP(8, __m256, _mm256)
}

FOR_16 static void mul_add_clamp_16(
    float *to, const float *from, int64_t count, float factor, float term, float low, float high
) {
    MUL_ADD_CLAMP(16, __m512, _mm512)
}

/* Uniforms, their inverse error functions and the epilogue, except for hard cases: see inverses_16. */
FN int64_t fill_uniform_erfinv(
    struct cursor *cursor, float *out, int64_t count, float low, float high, float factor, float term, float least,
    float most, float margin, float *hard, int32_t *indices
) {
    ALIGNED float drawn[CHUNK];
    struct stream stream;
    int64_t found = 0;
    begin(&stream, cursor);
    for (int64_t done = 0; done < count;) {
        const int some = at_most_chunk(count - done);
        uniforms_16(draw(&stream, some, 16), drawn, some, low, high);
        found += inverses_16(drawn, some, margin, hard + found, indices + found, (int32_t)done);
        mul_add_clamp_16(out + done, drawn, some, factor, term, least, most);
        done += some;
    }
    end(&stream, cursor);
    return found;
}

/* Of the normals that `words` yield, those at `indices`, counted from `first`. */
FN void selected(
    const uint32_t *words, const int32_t *indices, int32_t first, int count, float mean, float std, float *restrict out
) {
    float radii[CHUNK], angles[CHUNK];
    for (int i = 0; i < count; i++) {
        const int at = indices[i] - first;
        radii[i] = unit(temper(words[at & ~8]), 24);
        angles[i] = unit(temper(words[at | 8]), 24);
    }
    for (int i = 0; i < count; i++) {
        float cosine, sine;
        box_muller(radii[i], angles[i], mean, std, &cosine, &sine);
        out[i] = (indices[i] - first) & 8 ? sine : cosine;
    }
}

FOR_8 static void selected_8(
    const uint32_t *words, const int32_t *indices, int32_t first, int count, float mean, float std, float *restrict out
) {
    selected(words, indices, first, count, mean, std, out);
}

FOR_16 static void selected_16(
    const uint32_t *words, const int32_t *indices, int32_t first, int count, float mean, float std, float *restrict out
) {
    selected(words, indices, first, count, mean, std, out);
}

/* Of the next `count` normals, a multiple of 16, those at `indices`, which are ascending. */
FN void fill_selected(
    struct cursor *cursor, int64_t count, float mean, float std, const int32_t *indices, int64_t wanted, float *out,
    int lanes
) {
    struct stream stream;
    int64_t given = 0;
    begin(&stream, cursor);
    for (int64_t done = 0; done < count;) {
        const int some = at_most_chunk(count - done);
        const uint32_t *words = draw(&stream, some, lanes);
        int here = 0;
        while (given + here < wanted && indices[given + here] < done + some)
            here++;
        (lanes == 16 ? selected_16 : selected_8)(words, indices + given, (int32_t)done, here, mean, std, out + given);
        given += here;
        done += some;
    }
    end(&stream, cursor);
}

/* The indices, counted from `first`, of the numbers outside [low, high]; `count` is a multiple of 16. */
FOR_8 static int64_t outside_8(
    const float *from, int count, float low, float high, int32_t *indices, int32_t first
) {
    int64_t found = 0;
    for (int i = 0; i < count; i++) {
        indices[found] = first + i;
        found += (from[i] < low) | (from[i] > high);
    }
    return found;
}

FOR_16 static int64_t outside_16(
    const float *from, int count, float low, float high, int32_t *indices, int32_t first
) {
    int64_t found = 0;
    __m512i index = _mm512_add_epi32(
        _mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    );
    for (int i = 0; i < count; i += 16, index = _mm512_add_epi32(index, _mm512_set1_epi32(16))) {
        const __m512 x = _mm512_load_ps(from + i);
        const __mmask16 outside = _mm512_cmp_ps_mask(x, _mm512_set1_ps(low), _CMP_LT_OQ) |
                                  _mm512_cmp_ps_mask(x, _mm512_set1_ps(high), _CMP_GT_OQ);
        _mm512_storeu_si512(indices + found, _mm512_maskz_compress_epi32(outside, index));
        found += __builtin_popcount(outside);
    }
    return found;
}

/* The indices of those among the next `count` normals, a multiple of 16, that are outside [low, high]. */
FN int64_t indices_outside(
    struct cursor *cursor, int64_t count, float mean, float std, float low, float high, int32_t *indices, int lanes
) {
    ALIGNED float drawn[CHUNK];
    struct stream stream;
    int64_t found = 0;
    begin(&stream, cursor);
    for (int64_t done = 0; done < count;) {
        const int some = at_most_chunk(count - done);
        normals(draw(&stream, some, lanes), drawn, some, mean, std, lanes);
        found += (lanes == 16 ? outside_16 : outside_8)(drawn, some, low, high, indices + found, (int32_t)done);
        done += some;
    }
    end(&stream, cursor);
    return found;
}

/* The SIMD width that this machine supports, of those that the kernels are compiled for: 16, 8, or 0 for none. */
int firstloss_lanes(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 16
               : 8;
}

/* `normal_(mean, std)` on a contiguous float32 tensor of `count` >= 16 elements. */
EXPORT void firstloss_normal(
    struct cursor *cursor, float *out, int64_t count, double mean, double std, int lanes
) {
    fill_normal(cursor, out, count, (float)mean, (float)std, lanes);
}

/* `mul_(factor).add_(term).clamp_(low, high)` on `count` float32 elements, written to `to`. */
EXPORT void firstloss_mul_add_clamp(
    float *to, const float *from, int64_t count, float factor, float term, float low, float high, int lanes
) {
    (lanes == 16 ? mul_add_clamp_16 : mul_add_clamp_8)(to, from, count, factor, term, low, high);
}

/* The next `count` elements of a `normal_(mean, std)` or `uniform_(low, high)`: rows, split by columns into `parts`, in
 * float32 or, if `rounded`, bfloat16. The number of normals is a multiple of 16, without the fill's ragged end. */
EXPORT void firstloss_fill_columns(
    struct cursor *cursor, char *const *out, const int64_t *widths, int parts, int rounded, int64_t count, int normal,
    double first, double second, int lanes
) {
    const struct columns to = {out, widths, parts, rounded};
    fill_columns(cursor, &to, count, normal, (float)first, (float)second, lanes);
}

/* The indices of those outside [low, high] among the next `count` < 2^31 elements of a `normal_(mean, std)`, a multiple
 * of 16 without the fill's ragged end; returns their number. `indices` has `count` + 16 elements. */
EXPORT int64_t firstloss_normals_outside(
    struct cursor *cursor, int64_t count, double mean, double std, double low, double high, int32_t *indices, int lanes
) {
    return indices_outside(cursor, count, (float)mean, (float)std, (float)low, (float)high, indices, lanes);
}

/* Of the same elements those at `indices`, which are ascending. */
EXPORT void firstloss_normals_at(
    struct cursor *cursor, int64_t count, double mean, double std, const int32_t *indices, int64_t wanted, float *out,
    int lanes
) {
    fill_selected(cursor, count, (float)mean, (float)std, indices, wanted, out, lanes);
}

/* `x.erfinv_()` on `count` < 2^31 - 16 numbers, on 16 lanes: see inverses_16. */
EXPORT int64_t firstloss_erfinv(float *x, int64_t count, double margin, float *hard, int32_t *indices) {
    return inverses_16(x, count, (float)margin, hard, indices, 0);
}

/* `uniform_(low, high).erfinv_().mul_(factor).add_(term).clamp_(least, most)`, in the same way. */
EXPORT int64_t firstloss_uniform_erfinv(
    struct cursor *cursor, float *out, int64_t count, double low, double high, float factor, float term, float least,
    float most, double margin, float *hard, int32_t *indices
) {
    return fill_uniform_erfinv(
        cursor, out, count, (float)low, (float)high, factor, term, least, most, (float)margin, hard, indices
    );
}

/* Write `count` numbers to the elements at `indices`, which are not in the cache. */
EXPORT void firstloss_scatter(float *to, const float *from, const int32_t *indices, int64_t count) {
    const int64_t ahead = 32;
    for (int64_t i = 0; i < count; i++) {
        if (i + ahead < count)
            __builtin_prefetch(to + indices[i + ahead], 1);
        to[indices[i]] = from[i];
    }
}

/* `uniform_(low, high)` on a contiguous float32 tensor of `count` elements. */
EXPORT void firstloss_uniform(
    struct cursor *cursor, float *out, int64_t count, double low, double high, int lanes
) {
    fill_uniform(cursor, out, count, (float)low, (float)high, lanes);
}

#endif
