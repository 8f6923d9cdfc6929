/* The counter policy's float32 fills, bit-identical to counter.py, which documents them.
 *
 * Every floating-point operation is rounded separately, so this file must be compiled with -ffp-contract=off. Philox
 * runs on many blocks at a time, in loops that the compiler vectorizes.
 *
 * Called through ctypes; reentrant.
 */

#define UNFUSED
#include "_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

enum {
    LANES = 4,           /* words in a Philox block */
    BLOCKS = 64,         /* computed at a time */
    CHUNK = LANES * BLOCKS,
};

FN uint32_t high(uint32_t a, uint32_t b) {
    return (uint32_t)((uint64_t)a * b >> 32);
}

/* The words of BLOCKS blocks, beginning with block `first`: word j of block i is words[j][i]. */
FN void philox(uint64_t seed, uint64_t draw, uint64_t first, uint32_t words[LANES][BLOCKS]) {
    for (int i = 0; i < BLOCKS; i++) {
        uint32_t low = (uint32_t)first + (uint32_t)i;
        uint32_t x0 = low, x1 = (uint32_t)(first >> 32) + (low < (uint32_t)first);
        uint32_t x2 = (uint32_t)draw, x3 = (uint32_t)(draw >> 32);
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            uint32_t p_high = high(x0, 0xd2511f53u), p_low = x0 * 0xd2511f53u;
            uint32_t q_high = high(x2, 0xcd9e8d57u), q_low = x2 * 0xcd9e8d57u;
            x0 = q_high ^ x1 ^ k0;
            x1 = q_low;
            x2 = p_high ^ x3 ^ k1;
            x3 = p_low;
            k0 += 0x9e3779b9u;
            k1 += 0xbb67ae85u;
        }
        words[0][i] = x0;
        words[1][i] = x1;
        words[2][i] = x2;
        words[3][i] = x3;
    }
}

/* Two normals from two words. */
FN void pair(uint32_t first, uint32_t second, float *even, float *odd) {
    float radius = SQRT(-2.0f * log_of(((float)(int32_t)(first >> 8) + 1.0f) * 0x1p-24f));
    int32_t quarter = (int32_t)(second >> 30);
    float t = (float)((int32_t)(second >> 8 & 0x3fffffu) - 0x200000) * 0x1.921fb6p-22f; /* pi / 2 * 2^-22 */
    float z = t * t;
    float s = sine_near_zero(t, z), c = cosine_near_zero(z);
    int turned = quarter & 1;
    float cosine = turned ? s : c, sine = turned ? c : s;
    cosine = AS_FLOAT(AS_BITS(cosine) ^ (uint32_t)((quarter + 1) & 2) << 30);
    sine = AS_FLOAT(AS_BITS(sine) ^ (uint32_t)(quarter & 2) << 30);
    *even = radius * cosine;
    *odd = radius * sine;
}

FN void normals(uint32_t words[LANES][BLOCKS], float *restrict out, float mean, float std) {
    for (int i = 0; i < BLOCKS; i++) {
        float a, b, c, d;
        pair(words[0][i], words[1][i], &a, &b);
        pair(words[2][i], words[3][i], &c, &d);
        out[4 * i] = a * std + mean;
        out[4 * i + 1] = b * std + mean;
        out[4 * i + 2] = c * std + mean;
        out[4 * i + 3] = d * std + mean;
    }
}

FN float between(uint32_t word, float low, float span, float end) {
    float value = unit(word >> 8, 24) * span + low;
    return value == end ? low : value; /* rounded up to the excluded end */
}

FN void uniforms(uint32_t words[LANES][BLOCKS], float *restrict out, float low, float end) {
    float span = end - low;
    for (int i = 0; i < BLOCKS; i++) {
        out[4 * i] = between(words[0][i], low, span, end);
        out[4 * i + 1] = between(words[1][i], low, span, end);
        out[4 * i + 2] = between(words[2][i], low, span, end);
        out[4 * i + 3] = between(words[3][i], low, span, end);
    }
}

typedef void (*Transform)(uint32_t words[LANES][BLOCKS], float *restrict out, float first, float second);

/* Elements `begin` to `begin + count` of a draw. */
FN void fill(
    Transform transform, float *out, uint64_t seed, uint64_t draw, uint64_t begin, int64_t count, float first, float second
) {
    ALIGNED uint32_t words[LANES][BLOCKS];
    ALIGNED float made[CHUNK];
    uint64_t block = begin / LANES;
    int64_t skip = (int64_t)(begin % LANES);
    for (int64_t done = 0; done < count; block += BLOCKS, skip = 0) {
        philox(seed, draw, block, words);
        int64_t some = CHUNK - skip < count - done ? CHUNK - skip : count - done;
        if (some == CHUNK) {
            transform(words, out + done, first, second);
        } else {
            transform(words, made, first, second);
            memcpy(out + done, made + skip, (size_t)some * sizeof *out);
        }
        done += some;
    }
}

EXPORT CLONES void firstloss_counter_normal(
    float *out, uint64_t seed, uint64_t draw, uint64_t begin, int64_t count, double mean, double std
) {
    fill(normals, out, seed, draw, begin, count, (float)mean, (float)std);
}

EXPORT CLONES void firstloss_counter_uniform(
    float *out, uint64_t seed, uint64_t draw, uint64_t begin, int64_t count, double low, double end
) {
    fill(uniforms, out, seed, draw, begin, count, (float)low, (float)end);
}
