/* The inner loops of jump.py: generate words, tabulate the combinations of a window, and sum the selected rows.
 *
 * Called through ctypes; reentrant.
 */

#include "_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

enum {
    N = 624,
    M = 397,
    DIGIT = N - 1,         /* bits in a digit, the degree of Y */
    DIGITS = 33,           /* in a residue */
    REACH = DIGIT + N - 1, /* words of Y^k w that a digit reads */
};

/* The xor of every subset of each group of w, Yw, Y^2 w...: `table` has [groups][1 << group][REACH] words. */
CLONES static void combine(const uint32_t *window, uint32_t *table, int group) {
    uint32_t words[DIGITS - 1 + REACH];
    memcpy(words, window, N * sizeof *words);
    for (int i = N; i < DIGITS - 1 + REACH; i++)
        words[i] = words[i - N + M] ^ twist(words[i - N], words[i - N + 1]);
    for (int k = 0, length = DIGITS - 1 + REACH; k < DIGITS; k++, length--) {
        uint32_t *rows = table + (int64_t)(k / group) * (1 << group) * REACH;
        const uint32_t *last = words + length - REACH;
        int members = 1 << k % group;
        if (members == 1)
            memset(rows, 0, REACH * sizeof *rows);
        for (int row = 0; row < members; row++) {
            const uint32_t *from = rows + row * REACH;
            uint32_t *to = rows + (members + row) * REACH;
            for (int i = 0; i < REACH; i++)
                to[i] = from[i] ^ last[i];
        }
        for (int i = 0; i < length - 1; i++)
            words[i] = twist(words[i], words[i + 1]);
    }
}

#if defined(__GNUC__)
/* Explicit vectors: otherwise the compiler keeps the sums in memory. */
typedef uint32_t vector __attribute__((vector_size(32), aligned(4)));
#else
typedef uint32_t vector;
#endif

/* `result` is the xor of the rows of 624 words that begin at `offsets` in `table`. */
CLONES static void sum(const uint32_t *table, const int64_t *offsets, int64_t count, uint32_t *result) {
    enum { STRIPE = 6, WORDS = STRIPE * sizeof(vector) / sizeof(uint32_t) }; /* 48 or 6, of which 624 is a multiple */
    for (int begin = 0; begin < N; begin += WORDS) {
        const uint32_t *base = table + begin;
        vector a = {0}, b = a, c = a, d = a, e = a, f = a;
        for (int64_t k = 0; k < count; k++) {
            const vector *row = (const vector *)(base + offsets[k]);
            a ^= row[0];
            b ^= row[1];
            c ^= row[2];
            d ^= row[3];
            e ^= row[4];
            f ^= row[5];
        }
        vector *to = (vector *)(result + begin);
        to[0] = a;
        to[1] = b;
        to[2] = c;
        to[3] = d;
        to[4] = e;
        to[5] = f;
    }
}

/* Replace the first `count` <= 624 words of a window by those that follow it. */
CLONES static void replace(uint32_t *words, int count) {
    int i = 0;
    for (; i < N - M && i < count; i++)
        words[i] = words[i + M] ^ twist(words[i], words[i + 1]);
    for (; i < N - 1 && i < count; i++)
        words[i] = words[i + M - N] ^ twist(words[i], words[i + 1]);
    if (i < count)
        words[i] = words[i + M - N] ^ twist(words[i], words[0]);
}

/* The window `count` words after `window`, generated word by word. */
EXPORT void firstloss_generate(const uint32_t *window, int64_t count, uint32_t *result) {
    uint32_t words[N];
    int rest = count % N;
    memcpy(words, window, sizeof words);
    for (int64_t block = 0; block < count / N; block++)
        replace(words, N);
    replace(words, rest);
    memcpy(result, words + rest, (N - rest) * sizeof *words);
    memcpy(result + N - rest, words, rest * sizeof *words);
}

/* The sum of the `count` rows at `offsets` of the combinations of `window`; `table` is scratch. See `jump` in jump.py. */
EXPORT void firstloss_jump(const uint32_t *window, const int64_t *offsets, int64_t count, int group, uint32_t *table,
                           uint32_t *result) {
    combine(window, table, group);
    sum(table, offsets, count, result);
}
