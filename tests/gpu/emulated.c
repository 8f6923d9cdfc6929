/* The kernels on a CPU: the same source, one lane, warp and block after another. */

#include "_arithmetic.h"

#include "elements.h"
#include "mt19937.h"
#include "philox.h"

void jump_windows(uint32_t *windows, const uint32_t *pairs, uint32_t count, const uint32_t *digits) {
    static uint32_t words[2 * ALL], total[N];
    for (uint32_t n = 0; n < count; n++)
        jump(words, total, windows + (uint64_t)pairs[2 * n] * N, digits, windows + (uint64_t)pairs[2 * n + 1] * N);
}

void fill(const uint32_t *windows, const struct chunk *chunks, const struct segment *segments, uint32_t count) {
    static uint32_t ring[N];
    for (uint32_t n = 0; n < count; n++)
        fill_chunk(ring, windows, chunks + n, segments);
}

void philox_fill(const struct launch *launches, uint32_t count, uint64_t units) {
    for (uint64_t unit = 0; unit < units; unit++)
        fill_unit(launches, count, unit);
}

void philox_words(uint64_t key, uint64_t low, uint64_t high, uint32_t *out) {
    struct four words = philox(key, low, high);
    out[0] = words.x, out[1] = words.y, out[2] = words.z, out[3] = words.w;
}

void all_units(float *out, float low, float high) {
    for (uint32_t word = 0; word < 1u << 24; word++)
        out[word] = uniform(word, 24, low, high, high - low, FLOAT32);
}

void all_normals(const float *first, const float *second, int64_t count, float mean, float std, float *c, float *s) {
    for (int64_t i = 0; i < count; i++)
        box_muller(first[i], second[i], mean, std, c + i, s + i);
}

void to_half(const float *in, uint16_t *out, int64_t count, uint32_t dtype) {
    for (int64_t i = 0; i < count; i++)
        out[i] = dtype == BFLOAT16 ? to_bfloat16(in[i]) : to_float16(in[i]);
}

void from_half(const uint16_t *in, float *out, int64_t count, uint32_t dtype) {
    for (int64_t i = 0; i < count; i++)
        out[i] = dtype == BFLOAT16 ? from_bfloat16(in[i]) : from_float16(in[i]);
}

uint64_t sizes(uint32_t which) {
    return which == 0 ? sizeof(struct segment) : which == 1 ? sizeof(struct chunk) : sizeof(struct launch);
}
