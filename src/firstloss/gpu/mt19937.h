/* Fills from the CPU's random stream, on a GPU: a warp for each chunk of the stream.
 *
 * A window is 624 consecutive words of the stream, not tempered, beginning with the next one to be drawn. The host sends
 * one window; `jump_windows` computes the others, each by a jump from another one (see `rng/jump.py`); `fill` has a warp
 * draw each chunk, beginning at its window.
 */

enum { N = 624, M = 397, DIGITS = 33, DIGIT_WORDS = 20, BACK = 32, REACH = 1246, ALL = BACK + REACH };

/* Consecutive numbers of a fill in the stream.
 *   begin, words: their position in the stream; `words` is a multiple of the group size.
 *   first: the index of the first element.
 *   bits: the bits of a word that a uniform uses. */
struct segment {
    uint64_t begin, words, first;
    struct slice slice;
    double a, b;
    float range;
    uint32_t kind, dtype, bits;
};

/* The work of one warp: the groups that begin in [begin, end), of segments [from, to). */
struct chunk {
    uint64_t begin, end;
    uint32_t window, from, to, unused;
};

FN uint32_t wrapped(uint32_t i) {
    return i >= (uint32_t)N ? i - (uint32_t)N : i;
}

/* Generate the next 32 words in place of the oldest ones, at index `at`. */
FN uint32_t more(uint32_t *ring, uint32_t at) {
    PER_LANE(uint32_t, fresh);
    LANES(lane) {
        uint32_t i = wrapped(at + lane);
        OF(fresh, lane) = ring[wrapped(i + (uint32_t)M)] ^ twist(ring[i], ring[wrapped(i + 1u)]);
    }
    SYNC;
    LANES(lane) {
        ring[wrapped(at + lane)] = OF(fresh, lane);
    }
    SYNC;
    return wrapped(at + 32u);
}

FN void fill_chunk(
    uint32_t *ring, const uint32_t *windows, const struct chunk *chunk, const struct segment *segments
) {
    const uint32_t *window = windows + (uint64_t)chunk->window * N;
    LANES(lane) {
        for (uint32_t i = lane; i < (uint32_t)N; i += 32u)
            ring[i] = window[i];
    }
    SYNC;
    uint64_t made = chunk->begin + N; /* the ring holds the 624 words before it */
    uint32_t at = 0u;
    for (uint32_t n = chunk->from; n < chunk->to; n++) {
        const struct segment *segment = segments + n;
        const struct slice slice = segment->slice;
        const uint64_t begin = segment->begin, words = segment->words, first = segment->first;
        const uint32_t kind = segment->kind, dtype = segment->dtype, bits = segment->bits;
        const float a = (float)segment->a, b = (float)segment->b, range = segment->range;
        const uint32_t group = kind == NORMAL ? 16u : dtype == FLOAT64 ? 2u : 1u;
        const uint32_t step = group == 1u ? 32u : 64u;
        const uint64_t before = chunk->begin > begin ? (chunk->begin - begin + group - 1u) / group * group : 0u;
        const uint64_t until = chunk->end - begin < words ? chunk->end - begin : words;
        uint32_t slot = (uint32_t)((begin + before - chunk->begin) % N);
        for (uint64_t q = before; q < until; q += step) {
            while (made < begin + q + step) {
                at = more(ring, at);
                made += 32u;
            }
            LANES(lane) {
                if (kind == NORMAL) {
                    uint32_t i = 16u * (lane >> 3) + (lane & 7u);
                    uint64_t word = q + 16u * (lane >> 3);
                    if (word < until) {
                        uint32_t here = wrapped(slot + i);
                        float cosine, sine;
                        float u = unit(temper(ring[here]), 24u);
                        float v = unit(temper(ring[wrapped(here + 8u)]), 24u);
                        box_muller(u, v, a, b, &cosine, &sine);
                        store(&slice, first + q + i, cosine, dtype);
                        store(&slice, first + q + i + 8u, sine, dtype);
                    }
                } else if (dtype == FLOAT64) {
                    uint64_t word = q + 2u * lane;
                    if (word < until) {
                        uint32_t here = wrapped(slot + 2u * lane);
                        uint32_t high = temper(ring[here]), low = temper(ring[wrapped(here + 1u)]);
                        store_double(&slice, first + word / 2u, uniform_double(high, low, segment->a, segment->b));
                    }
                } else {
                    uint64_t word = q + lane;
                    if (word < until) {
                        uint32_t drawn = temper(ring[wrapped(slot + lane)]);
                        store(&slice, first + word, uniform(drawn, bits, a, b, range, dtype), dtype);
                    }
                }
            }
            SYNC;
            slot = wrapped(slot + step);
        }
    }
}

/* Jump from `window` by the polynomial `digits`. `words` is scratch for 2 * ALL words, `total` for N. */
FN void jump(uint32_t *words, uint32_t *total, const uint32_t *window, const uint32_t *digits, uint32_t *out) {
    uint32_t *other = words + ALL;
    EACH(i, (uint32_t)N) {
        words[BACK + i] = window[i];
        total[i] = 0u;
    }
    SYNC_BLOCK;
    /* The words before the window, by inverting the recurrence: it gives the top bit of one word and the low bits of the
     * next. */
    EACH(i, (uint32_t)BACK) {
        uint32_t mixed[2];
        for (uint32_t j = 0u; j < 2u; j++) {
            uint32_t twisted = window[N - BACK - 1 + i + j] ^ window[M - BACK - 1 + i + j];
            uint32_t shifted_out = twisted >> 31;
            mixed[j] = ((twisted ^ ((0u - shifted_out) & 0x9908b0dfu)) << 1) | shifted_out;
        }
        words[i] = (mixed[1] & 0x80000000u) | (mixed[0] & 0x7fffffffu);
    }
    for (uint32_t made = BACK + N; made < (uint32_t)ALL; made += (uint32_t)(N - M)) {
        uint32_t some = ALL - made < (uint32_t)(N - M) ? ALL - made : (uint32_t)(N - M);
        EACH(i, some) {
            uint32_t *word = words + made + i;
            word[0] = word[M - N] ^ twist(word[-N], word[1 - N]);
        }
        SYNC_BLOCK;
    }
    for (uint32_t k = 0u; k < (uint32_t)DIGITS; k++) {
        EACH(i, (uint32_t)(N / 2)) {
            const uint32_t *row = words + BACK + i;
            uint32_t low = total[i], high = total[i + N / 2];
            for (uint32_t j = 0u; j < (uint32_t)DIGIT_WORDS; j++) {
                uint32_t bits = digits[k * DIGIT_WORDS + j];
                for (uint32_t e = 32u * j; bits; e++, bits >>= 1) {
                    uint32_t mask = 0u - (bits & 1u);
                    low ^= row[e] & mask;
                    high ^= row[e + N / 2] & mask;
                }
            }
            total[i] = low;
            total[i + N / 2] = high;
        }
        EACH(i, (uint32_t)(ALL - 1)) {
            other[i + 1u] = twist(words[i], words[i + 1u]);
        }
        SYNC_BLOCK;
        uint32_t *swap = words;
        words = other;
        other = swap;
    }
    EACH(i, (uint32_t)N) {
        out[i] = total[i];
    }
    SYNC_BLOCK;
}

#ifdef __CUDACC__

extern "C" __global__ void __launch_bounds__(256, 4) fill(
    const uint32_t *windows, const struct chunk *chunks, const struct segment *segments, uint32_t count
) {
    __shared__ uint32_t rings[8][N];
    uint32_t warp = threadIdx.x >> 5, n = blockIdx.x * 8u + warp;
    if (n < count)
        fill_chunk(rings[warp], windows, chunks + n, segments);
}

extern "C" __global__ void __launch_bounds__(320) jump_windows(uint32_t *windows, const uint32_t *pairs, const uint32_t *digits) {
    __shared__ uint32_t words[2 * ALL], total[N], shared_digits[DIGITS * DIGIT_WORDS];
    EACH(i, (uint32_t)(DIGITS * DIGIT_WORDS)) {
        shared_digits[i] = digits[i];
    }
    const uint32_t *pair = pairs + 2u * blockIdx.x;
    jump(words, total, windows + (uint64_t)pair[0] * N, shared_digits, windows + (uint64_t)pair[1] * N);
}

#endif
