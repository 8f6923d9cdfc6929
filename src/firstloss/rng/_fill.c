/* Whole fills from PyTorch's CPU random stream, float32 and bfloat16, bit for bit what PyTorch's own kernels make.
 *
 * What has to come out is defined by ATen: `uniform_real` (ATen/core/TransformationHelper.h) and `normal_fill`
 * (ATen/native/cpu/DistributionTemplates.h), the latter with the logarithm, sine and cosine of
 * ATen/native/cpu/avx_mathfun.h. Those are the single precision polynomials of Cephes (S. L. Moshier, Cephes
 * Mathematical Library 2.2, 1992, single/logf.c and single/sinf.c) in the order of operations that J. Pommier's
 * sse_mathfun and G. Garberoglio's avx_mathfun gave them. PyTorch's compiler fuses some of the multiplications with
 * the additions that follow, which changes last bits. Which ones was found by experiment; in `_arithmetic.h` they are
 * fused where it says FMA and nowhere else, so this file must be compiled with -ffp-contract=off.
 *
 * What makes it fast: ATen makes its words one at a time, and goes over the tensor twice. Here words are made some
 * thousands at a time, in loops that the compiler turns into vectors, and are normals before they leave the first
 * level of cache. The loops are compiled for vectors of 8 and of 16 numbers; the caller chooses what the machine has.
 *
 * No Python and no state but the caller's: called through ctypes, from any number of threads at once.
 */

#include "_kernels.h"

EXPORT int firstloss_lanes(void);

#if !defined(__x86_64__) || !defined(__GNUC__)

/* Elsewhere PyTorch has other kernels. */
int firstloss_lanes(void) {
    return 0;
}

#else

#include "_erfinv.h"

enum {
    N = 624,            /* words in a block */
    M = 397,            /* the recurrence's middle term */
    BLOCKS = 4,         /* made at a time: with the uniforms made of them, 22 KB of the first level of cache */
    CHUNK = BLOCKS * N, /* a multiple of 16 */
};

/* Where in the stream we are, as ATen's mt19937 keeps it: the block that is drawn from, and how many of its words have
 * been drawn. The same structure is in native.py. */
struct cursor {
    uint32_t words[N];
    uint32_t drawn;
};

/* The next `count` uniforms, 24 bits each; at most CHUNK. `words` is the block that is drawn from and room for BLOCKS
 * more behind it; afterwards it begins with the block that was drawn from last. */
FN void draw(uint32_t *words, uint32_t *drawn, float *restrict out, int count) {
    const int first = (int)*drawn;
    const int blocks = (first + count - 1) / N;

    /* The recurrence of mt19937.py, laid out straight instead of in a ring: each word needs none of the 227 before it,
     * so that whole vectors of them can be made. */
    for (int i = 0; i < blocks * N; i++)
        words[i + N] = words[i + M] ^ twist(words[i], words[i + 1]);
    for (int i = 0; i < count; i++)
        out[i] = unit(temper(words[first + i]), 24);
    if (blocks > 0)
        memcpy(words, words + blocks * N, N * sizeof *words);
    *drawn = (uint32_t)(first + count - blocks * N);
}

/* Normals from as many uniforms, in groups of 16: eight for the radii, then eight for the angles of the pairs. */
FN void normals(const float *restrict uniforms, float *restrict out, int count, float mean, float std) {
    for (int i = 0; i < count; i += 16) {
        for (int j = i; j < i + 8; j++) {
            float cosine, sine;
            box_muller(uniforms[j], uniforms[j + 8], mean, std, &cosine, &sine);
            out[j] = cosine;
            out[j + 8] = sine;
        }
    }
}

/* Uniforms of [low, high) from those of [0, 1). */
FN void scale(const float *restrict uniforms, float *restrict out, int count, float low, float high) {
    for (int i = 0; i < count; i++) {
        float value = FMA(uniforms[i], high - low, low);
        out[i] = value == high ? low : value; /* rounded up to the end that is left out */
    }
}

FN void fill_normal(struct cursor *cursor, float *out, int64_t count, float mean, float std) {
    ALIGNED uint32_t words[N + CHUNK];
    ALIGNED float uniforms[CHUNK];
    memcpy(words, cursor->words, sizeof cursor->words);
    int64_t done = 0;
    for (int64_t whole = count & ~(int64_t)15; done < whole;) {
        int some = whole - done < CHUNK ? (int)(whole - done) : CHUNK;
        draw(words, &cursor->drawn, uniforms, some);
        normals(uniforms, out + done, some, mean, std);
        done += some;
    }
    if (done < count) {
        /* ATen draws for the ragged end too, and then makes the last 16 anew. */
        draw(words, &cursor->drawn, uniforms, (int)(count - done));
        draw(words, &cursor->drawn, uniforms, 16);
        normals(uniforms, out + count - 16, 16, mean, std);
    }
    memcpy(cursor->words, words, sizeof cursor->words);
}

FN void fill_uniform(struct cursor *cursor, float *out, int64_t count, float low, float high) {
    ALIGNED uint32_t words[N + CHUNK];
    ALIGNED float uniforms[CHUNK];
    memcpy(words, cursor->words, sizeof cursor->words);
    for (int64_t done = 0; done < count;) {
        int some = count - done < CHUNK ? (int)(count - done) : CHUNK;
        draw(words, &cursor->drawn, uniforms, some);
        scale(uniforms, out + done, some, low, high);
        done += some;
    }
    memcpy(cursor->words, words, sizeof cursor->words);
}

/* Rows that are cut into parts side by side: the next numbers of a fill, row by row, each part's to its own memory. */
struct columns {
    char *const *out;       /* of each part, where its columns of the first row go; its rows lie one after another */
    const int64_t *widths;  /* of each part, a row's numbers */
    int parts;
    int rounded;            /* whether they are bfloat16, and not float32 */
};

FN uint16_t to_bfloat16(float x) {
    const uint32_t bits = AS_BITS(x);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16); /* to the nearest, or the even one; not for NaN */
}

/* Rounds numbers to bfloat16. A uniform that is rounded up to `high`, which is left out, becomes `low`: ATen compares
 * again after this rounding. */
FN void round_all(const float *restrict from, uint16_t *restrict to, int count, int normal, float low, float high) {
    const uint16_t begin = to_bfloat16(low), end = to_bfloat16(high);
    for (int i = 0; i < count; i++) {
        const uint16_t x = to_bfloat16(from[i]);
        to[i] = !normal && x == end ? begin : x;
    }
}

FN void fill_columns(
    struct cursor *cursor, const struct columns *to, int64_t count, int normal, float first, float second
) {
    ALIGNED uint32_t words[N + CHUNK];
    ALIGNED float uniforms[CHUNK];
    ALIGNED float made[CHUNK];
    ALIGNED uint16_t rounded[CHUNK];
    const char *from = to->rounded ? (const char *)rounded : (const char *)made;
    const size_t size = to->rounded ? sizeof *rounded : sizeof *made;
    memcpy(words, cursor->words, sizeof cursor->words);
    int part = 0;
    int64_t row = 0, column = 0; /* of the part */
    for (int64_t done = 0; done < count;) {
        int some = count - done < CHUNK ? (int)(count - done) : CHUNK;
        draw(words, &cursor->drawn, uniforms, some);
        if (normal)
            normals(uniforms, made, some, first, second);
        else
            scale(uniforms, made, some, first, second);
        if (to->rounded)
            round_all(made, rounded, some, normal, first, second);
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
    memcpy(cursor->words, words, sizeof cursor->words);
}

#define FOR_8 __attribute__((target("avx2,fma")))

FOR_8 static void normal_8(struct cursor *cursor, float *out, int64_t count, float mean, float std) {
    fill_normal(cursor, out, count, mean, std);
}

FOR_16 static void normal_16(struct cursor *cursor, float *out, int64_t count, float mean, float std) {
    fill_normal(cursor, out, count, mean, std);
}

FOR_8 static void uniform_8(struct cursor *cursor, float *out, int64_t count, float low, float high) {
    fill_uniform(cursor, out, count, low, high);
}

FOR_16 static void uniform_16(struct cursor *cursor, float *out, int64_t count, float low, float high) {
    fill_uniform(cursor, out, count, low, high);
}

FOR_8 static void columns_8(
    struct cursor *cursor, const struct columns *to, int64_t count, int normal, float first, float second
) {
    fill_columns(cursor, to, count, normal, first, second);
}

FOR_16 static void columns_16(
    struct cursor *cursor, const struct columns *to, int64_t count, int normal, float first, float second
) {
    fill_columns(cursor, to, count, normal, first, second);
}

/* What is left to do to a fill, from one level of cache to memory that nobody reads soon: times, plus, between. Each is
 * rounded by itself; a NaN stays what it is. Stores go round the cache, which would read the memory first. */
FN float finished(float x, float factor, float term, float low, float high) {
    x = x * factor;
    x = x + term;
    x = x < low ? low : x;
    return x > high ? high : x;
}

#define FINISH(LANES, VECTOR, PREFIX)                                                                                  \
    int64_t i = 0;                                                                                                     \
    for (; i < count && ((uintptr_t)(to + i) & (LANES * sizeof(float) - 1)); i++)                                      \
        to[i] = finished(from[i], factor, term, low, high);                                                            \
    for (; i + LANES <= count; i += LANES) {                                                                           \
        VECTOR x = PREFIX##_loadu_ps(from + i);                                                                        \
        x = PREFIX##_add_ps(PREFIX##_mul_ps(x, PREFIX##_set1_ps(factor)), PREFIX##_set1_ps(term));                     \
        x = PREFIX##_max_ps(PREFIX##_set1_ps(low), x); /* the second where one is no number */                         \
        PREFIX##_stream_ps(to + i, PREFIX##_min_ps(PREFIX##_set1_ps(high), x));                                        \
    }                                                                                                                  \
    for (; i < count; i++)                                                                                             \
        to[i] = finished(from[i], factor, term, low, high);                                                            \
    _mm_sfence();

FOR_8 static void finish_8(
    float *to, const float *from, int64_t count, float factor, float term, float low, float high
) {
    FINISH(8, __m256, _mm256)
}

FOR_16 static void finish_16(
    float *to, const float *from, int64_t count, float factor, float term, float low, float high
) {
    FINISH(16, __m512, _mm512)
}

/* Uniforms, their inverse error functions, and what is left to do to these, but for those in doubt: see inverses_16. */
FOR_16 static int64_t uniform_erfinv_16(
    struct cursor *cursor, float *out, int64_t count, float low, float high, float factor, float term, float least,
    float most, float doubt, float *left, int32_t *where
) {
    ALIGNED uint32_t words[N + CHUNK];
    ALIGNED float uniforms[CHUNK];
    ALIGNED float made[CHUNK];
    int64_t found = 0;
    memcpy(words, cursor->words, sizeof cursor->words);
    for (int64_t done = 0; done < count;) {
        int some = count - done < CHUNK ? (int)(count - done) : CHUNK;
        draw(words, &cursor->drawn, uniforms, some);
        scale(uniforms, made, some, low, high);
        found += inverses_16(made, some, doubt, left + found, where + found, (int32_t)done);
        finish_16(out + done, made, some, factor, term, least, most);
        done += some;
    }
    memcpy(cursor->words, words, sizeof cursor->words);
    return found;
}

/* The next `count` normals, a multiple of 16, of which only those are made whose indices, in ascending order, are in
 * `where`. */
FN void normals_at(
    struct cursor *cursor, int64_t count, float mean, float std, const int32_t *where, int64_t wanted, float *out
) {
    ALIGNED uint32_t words[N + CHUNK];
    ALIGNED float uniforms[CHUNK];
    ALIGNED float radii[CHUNK], angles[CHUNK];
    ALIGNED int32_t second[CHUNK];
    int64_t given = 0;
    memcpy(words, cursor->words, sizeof cursor->words);
    for (int64_t done = 0; done < count;) {
        int some = count - done < CHUNK ? (int)(count - done) : CHUNK;
        draw(words, &cursor->drawn, uniforms, some);
        int here = 0;
        for (; given + here < wanted && where[given + here] < done + some; here++) {
            const int i = (int)(where[given + here] - done);
            radii[here] = uniforms[i & ~8];
            angles[here] = uniforms[i | 8];
            second[here] = i & 8;
        }
        for (int i = 0; i < here; i++) {
            float cosine, sine;
            box_muller(radii[i], angles[i], mean, std, &cosine, &sine);
            out[given + i] = second[i] ? sine : cosine;
        }
        given += here;
        done += some;
    }
    memcpy(cursor->words, words, sizeof cursor->words);
}

/* The indices, counted from `first`, of those among `count` numbers, a multiple of 16, that lie outside [low, high]. */
FOR_8 static int64_t places_8(const float *from, int count, float low, float high, int32_t *where, int32_t first) {
    int64_t found = 0;
    for (int i = 0; i < count; i++) {
        where[found] = first + i;
        found += (from[i] < low) | (from[i] > high);
    }
    return found;
}

FOR_16 static int64_t places_16(const float *from, int count, float low, float high, int32_t *where, int32_t first) {
    int64_t found = 0;
    __m512i index = _mm512_add_epi32(
        _mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    );
    for (int i = 0; i < count; i += 16, index = _mm512_add_epi32(index, _mm512_set1_epi32(16))) {
        const __m512 x = _mm512_load_ps(from + i);
        const __mmask16 outside = _mm512_cmp_ps_mask(x, _mm512_set1_ps(low), _CMP_LT_OQ) |
                                  _mm512_cmp_ps_mask(x, _mm512_set1_ps(high), _CMP_GT_OQ);
        _mm512_storeu_si512(where + found, _mm512_maskz_compress_epi32(outside, index));
        found += __builtin_popcount(outside);
    }
    return found;
}

/* The next `count` normals, a multiple of 16, of which it says only which lie outside [low, high]. */
#define OUTSIDE(PLACES)                                                                                                \
    ALIGNED uint32_t words[N + CHUNK];                                                                                 \
    ALIGNED float uniforms[CHUNK];                                                                                     \
    ALIGNED float made[CHUNK];                                                                                         \
    int64_t found = 0;                                                                                                 \
    memcpy(words, cursor->words, sizeof cursor->words);                                                                \
    for (int64_t done = 0; done < count;) {                                                                            \
        int some = count - done < CHUNK ? (int)(count - done) : CHUNK;                                                 \
        draw(words, &cursor->drawn, uniforms, some);                                                                   \
        normals(uniforms, made, some, mean, std);                                                                   \
        found += PLACES(made, some, low, high, where + found, (int32_t)done);                                          \
        done += some;                                                                                                  \
    }                                                                                                                  \
    memcpy(cursor->words, words, sizeof cursor->words);                                                                \
    return found;

FOR_8 static int64_t outside_8(
    struct cursor *cursor, int64_t count, float mean, float std, float low, float high, int32_t *where
) {
    OUTSIDE(places_8)
}

FOR_16 static int64_t outside_16(
    struct cursor *cursor, int64_t count, float mean, float std, float low, float high, int32_t *where
) {
    OUTSIDE(places_16)
}

FOR_8 static void at_8(
    struct cursor *cursor, int64_t count, float mean, float std, const int32_t *where, int64_t wanted, float *out
) {
    normals_at(cursor, count, mean, std, where, wanted, out);
}

FOR_16 static void at_16(
    struct cursor *cursor, int64_t count, float mean, float std, const int32_t *where, int64_t wanted, float *out
) {
    normals_at(cursor, count, mean, std, where, wanted, out);
}

/* The widest vectors that this machine has, of those that the kernels are compiled for: 16, 8, or 0 for none. */
int firstloss_lanes(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 16
               : 8;
}

/* What `normal_(mean, std)` makes of a contiguous float32 tensor of `count` >= 16 elements. */
EXPORT void firstloss_normal(
    struct cursor *cursor, float *out, int64_t count, double mean, double std, int lanes
) {
    (lanes == 16 ? normal_16 : normal_8)(cursor, out, count, (float)mean, (float)std);
}

/* What `mul_(factor).add_(term).clamp_(low, high)` makes of `count` float32 elements, written elsewhere. */
EXPORT void firstloss_finish(
    float *to, const float *from, int64_t count, float factor, float term, float low, float high, int lanes
) {
    (lanes == 16 ? finish_16 : finish_8)(to, from, count, factor, term, low, high);
}

/* The next `count` elements of a `normal_(mean, std)` or `uniform_(low, high)`: rows, cut into `parts` side by side, in
 * float32 or, if `rounded`, in bfloat16. Of normals a multiple of 16, and not the fill's last 16 where it is ragged. */
EXPORT void firstloss_fill_columns(
    struct cursor *cursor, char *const *out, const int64_t *widths, int parts, int rounded, int64_t count, int normal,
    double first, double second, int lanes
) {
    const struct columns to = {out, widths, parts, rounded};
    (lanes == 16 ? columns_16 : columns_8)(cursor, &to, count, normal, (float)first, (float)second);
}

/* The indices of those outside [low, high] among the next `count` < 2^31 elements of a `normal_(mean, std)`, a multiple
 * of 16 and not the fill's ragged end; returns how many. There is room for `count` + 16. */
EXPORT int64_t firstloss_normals_outside(
    struct cursor *cursor, int64_t count, double mean, double std, double low, double high, int32_t *where, int lanes
) {
    return (lanes == 16 ? outside_16 : outside_8)(
        cursor, count, (float)mean, (float)std, (float)low, (float)high, where
    );
}

/* Of the same elements those at the indices `where`, which ascend. */
EXPORT void firstloss_normals_at(
    struct cursor *cursor, int64_t count, double mean, double std, const int32_t *where, int64_t wanted, float *out,
    int lanes
) {
    (lanes == 16 ? at_16 : at_8)(cursor, count, (float)mean, (float)std, where, wanted, out);
}

/* `x.erfinv_()` of `count` < 2^31 - 16 numbers, on 16 lanes: see inverses_16. */
EXPORT int64_t firstloss_erfinv(float *x, int64_t count, double doubt, float *left, int32_t *where) {
    return inverses_16(x, count, (float)doubt, left, where, 0);
}

/* `uniform_(low, high).erfinv_().mul_(factor).add_(term).clamp_(least, most)` of as many elements, likewise. */
EXPORT int64_t firstloss_uniform_erfinv(
    struct cursor *cursor, float *out, int64_t count, double low, double high, float factor, float term, float least,
    float most, double doubt, float *left, int32_t *where
) {
    return uniform_erfinv_16(
        cursor, out, count, (float)low, (float)high, factor, term, least, most, (float)doubt, left, where
    );
}

/* Writes `count` numbers to those elements that `where` has the indices of, none of which is in the cache. */
EXPORT void firstloss_put(float *to, const float *from, const int32_t *where, int64_t count) {
    const int64_t ahead = 32;
    for (int64_t i = 0; i < count; i++) {
        if (i + ahead < count)
            __builtin_prefetch(to + where[i + ahead], 1);
        to[where[i]] = from[i];
    }
}

/* What `uniform_(low, high)` makes of a contiguous float32 tensor of `count` elements. */
EXPORT void firstloss_uniform(
    struct cursor *cursor, float *out, int64_t count, double low, double high, int lanes
) {
    (lanes == 16 ? uniform_16 : uniform_8)(cursor, out, count, (float)low, (float)high);
}

#endif
