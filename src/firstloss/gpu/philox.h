/* Slices of fills from PyTorch's CUDA random stream. `rng/cuda_layout.py` says which thread of PyTorch's kernel computes
 * an element, from which of its numbers.
 *
 * The arithmetic is cuRAND's and ATen's, and the compiler contracts the same operations to FMAs: this file is compiled
 * with PyTorch's options, and the results are compared with PyTorch's on the device (`probe.py`).
 */

/* One launch of a fill by PyTorch, and the slice of it to write.
 *   begin: the index of the launch's first element in its fill; numel: the launch's elements.
 *   threads: of PyTorch's launch, in all blocks. lanes: numbers per Philox block. */
struct launch {
    uint64_t seed, offset, begin, numel, threads;
    uint64_t first_unit, first_block; /* the index of its first unit among all; the first Philox block to compute */
    struct slice slice;
    double a, b;
    float range;
    uint32_t kind, dtype, lanes, tiles;
};

struct four {
    uint32_t x, y, z, w;
};

FN uint32_t high_half(uint32_t a, uint32_t b) {
    return (uint32_t)(((uint64_t)a * b) >> 32);
}

/* Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011): Philox4x32-10. */
FN struct four philox(uint64_t key, uint64_t low, uint64_t high) {
    struct four c = {(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)};
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint32_t p = high_half(0xd2511f53u, c.x), q = high_half(0xcd9e8d57u, c.z);
        struct four next = {q ^ c.y ^ k0, 0xcd9e8d57u * c.z, p ^ c.w ^ k1, 0xd2511f53u * c.x};
        c = next;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return c;
}

/* cuRAND's uniform in (0, 1]. */
FN float curand_unit(uint32_t x) {
    return (float)x * 2.3283064e-10f + 2.3283064e-10f / 2.0f;
}

FN double curand_unit_double(uint32_t x, uint32_t y) {
    uint64_t z = (uint64_t)x ^ ((uint64_t)y << 21);
    return (double)z * 1.1102230246251565e-16 + 1.1102230246251565e-16 / 2.0;
}

FN void curand_box_muller(uint32_t x, uint32_t y, float *first, float *second) {
    float u = (float)x * 2.3283064e-10f + 2.3283064e-10f / 2;
    float v = (float)y * (2.3283064e-10f * 6.2831855f) + (2.3283064e-10f * 6.2831855f) / 2;
    float s = sqrtf(-2.0f * logf(u));
#ifdef __CUDACC__
    __sincosf(v, first, second);
#else
    *first = sinf(v);
    *second = cosf(v);
#endif
    *first *= s;
    *second *= s;
}

/* A whole Philox block yields two doubles. */
FN void curand_box_muller_double(struct four words, double *first, double *second) {
    uint64_t x = (uint64_t)words.x ^ ((uint64_t)words.y << 21), y = (uint64_t)words.z ^ ((uint64_t)words.w << 21);
    double u = (double)x * 1.1102230246251565e-16 + 1.1102230246251565e-16 / 2.0;
    double v = (double)y * (1.1102230246251565e-16 * 2.0) + 1.1102230246251565e-16; /* in units of pi */
    double s = sqrt(-2.0 * log(u));
#ifdef __CUDACC__
    sincospi(v, first, second);
#else
    *first = sin(v * 3.1415926535897932);
    *second = cos(v * 3.1415926535897932);
#endif
    *first *= s;
    *second *= s;
}

/* PyTorch's transformation of cuRAND's numbers: uniforms to [low, high), normals to mean and std. */
FN void emit(const struct launch *launch, uint64_t element, float x) {
    float a = (float)launch->a, b = (float)launch->b;
    if (launch->kind == NORMAL)
        x = x * b + a;
    else {
        x = rounded(x * launch->range + a, launch->dtype);
        x = x == b ? a : x;
    }
    store(&launch->slice, element, x, launch->dtype);
}

FN void emit_double(const struct launch *launch, uint64_t element, double x) {
    if (launch->kind == NORMAL)
        x = x * launch->b + launch->a;
    else {
        x = x * (launch->b - launch->a) + launch->a;
        x = x == launch->b ? launch->a : x;
    }
    store_double(&launch->slice, element, x);
}

/* One iteration of one thread of PyTorch's launch: the elements of one Philox block. */
FN void iteration(const struct launch *launch, uint64_t block, uint64_t thread) {
    if (thread >= launch->threads)
        return;
    const uint64_t stride = launch->threads, begin = launch->begin;
    uint64_t element = block * launch->lanes * stride + thread;
    if (element >= launch->numel)
        return;
    struct four words = philox(launch->seed, launch->offset / 4u + block, thread);
    if (launch->dtype == FLOAT64) {
        double first = curand_unit_double(words.x, words.y), second = curand_unit_double(words.z, words.w);
        if (launch->kind == NORMAL)
            curand_box_muller_double(words, &first, &second);
        emit_double(launch, begin + element, first);
        if (element + stride < launch->numel)
            emit_double(launch, begin + element + stride, second);
        return;
    }
    float made[4];
    if (launch->kind == NORMAL) {
        curand_box_muller(words.x, words.y, made, made + 1);
        curand_box_muller(words.z, words.w, made + 2, made + 3);
    } else {
        made[0] = curand_unit(words.x);
        made[1] = curand_unit(words.y);
        made[2] = curand_unit(words.z);
        made[3] = curand_unit(words.w);
    }
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t lane = 0u; lane < 4u; lane++) {
        if (element < launch->numel)
            emit(launch, begin + element, made[lane]);
        element += stride;
    }
}

/* The launch that a unit belongs to, by binary search. */
FN uint32_t launch_of(const struct launch *launches, uint32_t count, uint64_t unit) {
    uint32_t low = 0u, high = count;
    while (high - low > 1u) {
        uint32_t middle = (low + high) / 2u;
        if (launches[middle].first_unit <= unit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* A unit is an iteration of 1,024 threads of PyTorch's launch. */
FN void fill_unit(const struct launch *launches, uint32_t count, uint64_t unit) {
    const struct launch *launch = launches + launch_of(launches, count, unit);
    uint64_t number = unit - launch->first_unit;
    uint64_t block = launch->first_block + number / launch->tiles, tile = number % launch->tiles;
    EACH(i, 1024u) {
        iteration(launch, block, tile * 1024u + i);
    }
}

#ifdef __CUDACC__

extern "C" __global__ void __launch_bounds__(256) philox_fill(const struct launch *launches, uint32_t count, uint64_t units) {
    for (uint64_t unit = blockIdx.x; unit < units; unit += gridDim.x)
        fill_unit(launches, count, unit);
}

#endif
