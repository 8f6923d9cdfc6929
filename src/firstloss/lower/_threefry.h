/* Random bits as jax.random makes them: by Threefry-2x32 with 20 rounds (Salmon and others, "Parallel random numbers: as
 * easy as 1, 2, 3", 2011), of a key and a counter. See threefry.py. */

#include <stdint.h>

#include "_processor.h"

enum { HASHES = 256, ROUNDS = 20, ROUNDS_PER_KEY = 4 };

static INLINE uint32_t rotated(uint32_t x, int by) { return x << by | x >> (32 - by); }

/* The hashes of HASHES counters, from `first`. */
static INLINE void hash(const uint32_t *key, uint64_t first, uint32_t *high, uint32_t *low) {
    static const int rotations[2][ROUNDS_PER_KEY] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
    _Pragma("GCC ivdep")
    for (int i = 0; i < HASHES; i++) {
        uint32_t x = (uint32_t)((first + (uint64_t)i) >> 32) + keys[0], y = (uint32_t)first + (uint32_t)i + keys[1];
        _Pragma("GCC unroll 20")
        for (int round = 0; round < ROUNDS; round++) {
            int group = round / ROUNDS_PER_KEY;
            x += y;
            y = rotated(y, rotations[group % 2][round % ROUNDS_PER_KEY]) ^ x;
            if (round % ROUNDS_PER_KEY == ROUNDS_PER_KEY - 1) {
                x += keys[(group + 1) % 3];
                y += keys[(group + 2) % 3] + (uint32_t)(group + 1);
            }
        }
        high[i] = x;
        low[i] = y;
    }
}

/* What becomes of a hash: bits in the width of the result's elements, or both words, one after the other. */
enum form { WIDTH_8, WIDTH_16, WIDTH_32, WIDTH_64, WORDS };

#define EACH_HASH(type, value)              \
    for (int64_t i = 0; i < count; i++) {   \
        ((type *)out)[from + i] = (type)(value); \
    }                                       \
    break

static INLINE void random_bits_inline(const uint32_t *key, uint32_t first, enum form form, void *out, int64_t from,
                                      int64_t to) {
    uint32_t high[HASHES], low[HASHES];
    for (; from < to; from += HASHES) {
        int64_t count = to - from < HASHES ? to - from : HASHES;
        hash(key, first + (uint64_t)from, high, low);
        switch (form) {
        case WIDTH_8: EACH_HASH(uint8_t, high[i] ^ low[i]);
        case WIDTH_16: EACH_HASH(uint16_t, high[i] ^ low[i]);
        case WIDTH_32: EACH_HASH(uint32_t, high[i] ^ low[i]);
        case WIDTH_64: EACH_HASH(uint64_t, (uint64_t)high[i] << 32 | low[i]);
        case WORDS:
            for (int64_t i = 0; i < count; i++) {
                ((uint32_t *)out)[2 * (from + i)] = high[i];
                ((uint32_t *)out)[2 * (from + i) + 1] = low[i];
            }
        }
    }
}

BY_PROCESSOR(random_bits,
             (const uint32_t *key, uint32_t first, enum form form, void *out, int64_t from, int64_t to),
             (key, first, form, out, from, to))

/* Another key, as by jax.random.fold_in. */
static INLINE void fold_in(uint32_t *key, uint32_t data) {
    uint32_t high[HASHES], low[HASHES];
    hash(key, data, high, low);
    key[0] = high[0];
    key[1] = low[0];
}

/* Whether numbers from 0 to 1 are below p: elements `from` to `to` of a draw of the step that has the two words `seed`. */
static INLINE void bernoulli_inline(const uint32_t *seed, uint32_t draw, float p, uint8_t *out, int64_t from, int64_t to) {
    uint32_t key[2] = {0, seed[0]}, high[HASHES], low[HASHES];
    fold_in(key, seed[1]);
    fold_in(key, draw);
    for (; from < to; from += HASHES) {
        int64_t count = to - from < HASHES ? to - from : HASHES;
        hash(key, (uint64_t)from, high, low);
        for (int64_t i = 0; i < count; i++) {
            out[from + i] = (float)(int32_t)((high[i] ^ low[i]) >> 9) * 0x1p-23f < p;
        }
    }
}

BY_PROCESSOR(bernoulli,
             (const uint32_t *seed, uint32_t draw, float p, uint8_t *out, int64_t from, int64_t to),
             (seed, draw, p, out, from, to))
