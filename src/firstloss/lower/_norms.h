/* Normalizations of float32 and bfloat16 arrays: see norms.py. Batch normalization of (batch, channels, ...), one channel
 * after another; layer, RMS and group normalization of (rows, length), one row after another.
 *
 * As in PyTorch's kernels, sums are in double precision. So one pass gives both sums of a channel: subtracting the mean
 * afterwards loses less than the elements have lost by being float32. What is no element of input, output or gradients
 * (weights, statistics) is float32 always. */

#include <math.h>
#include <stdint.h>

#include "_processor.h"

typedef float floats __attribute__((vector_size(32), aligned(4)));
typedef double doubles __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef uint16_t halves __attribute__((vector_size(16), aligned(2)));

/* Element i. A bfloat16 number has the upper half of the bits that the number has in float32. */
static INLINE float get(const void *x, int64_t i, int narrow) {
    if (!narrow) {
        return ((const float *)x)[i];
    }
    union {
        uint32_t bits;
        float value;
    } wide = {(uint32_t)((const uint16_t *)x)[i] << 16};
    return wide.value;
}

/* Eight elements from i on. */
static INLINE void get_8(floats *eight, const void *x, int64_t i, int narrow) {
    if (narrow) {
        *eight = (floats)(__builtin_convertvector(*(const halves *)((const uint16_t *)x + i), words) << 16);
    } else {
        *eight = *(const floats *)((const float *)x + i);
    }
}

/* Rounds to the nearest, and to the even one of two. */
static INLINE void put(void *y, int64_t i, float value, int narrow) {
    if (!narrow) {
        ((float *)y)[i] = value;
        return;
    }
    union {
        float value;
        uint32_t bits;
    } wide = {value};
    uint32_t rounded = (wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16;
    ((uint16_t *)y)[i] = (uint16_t)(value != value ? 0x7fc0 : rounded);
}

/* Where the elements of one channel are: `rows` times `length` of them, the rows `stride` elements apart. */
struct channel {
    int64_t rows, length, stride;
};

struct sums {
    double first, products;
};

static INLINE double sum_of_lanes(const doubles *x) {
    const doubles lanes = *x;
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/* The sum of u, and of u * v, from element `at` on. */
static INLINE struct sums sums_of(struct channel channel, const void *u, const void *v, int64_t at, int narrow) {
    doubles first[2] = {{0}, {0}}, products[2] = {{0}, {0}};
    struct sums sums = {0, 0};
    for (int64_t row = 0; row < channel.rows; row++, at += channel.stride) {
        int64_t i = at, end = at + channel.length;
        for (; i + 16 <= end; i += 16) {
            for (int half = 0; half < 2; half++) {
                floats of_u, of_v;
                get_8(&of_u, u, i + 8 * half, narrow);
                get_8(&of_v, v, i + 8 * half, narrow);
                doubles a = __builtin_convertvector(of_u, doubles);
                first[half] += a;
                products[half] += a * __builtin_convertvector(of_v, doubles);
            }
        }
        for (; i < end; i++) {
            sums.first += get(u, i, narrow);
            sums.products += (double)get(u, i, narrow) * get(v, i, narrow);
        }
    }
    first[0] += first[1];
    products[0] += products[1];
    sums.first += sum_of_lanes(&first[0]);
    sums.products += sum_of_lanes(&products[0]);
    return sums;
}

/* Rounding can make a sum of squares negative; NaN stays. */
static INLINE double not_negative(double x) { return x < 0 ? 0 : x; }

struct batch_norm {
    int narrow; /* x and y are bfloat16 */
    int64_t batch, channels, length;
    double eps, momentum;
    const void *x;
    void *y;
    const float *weight, *bias, *running_mean, *running_var;     /* may be NULL */
    float *mean, *rstd, *new_running_mean, *new_running_var;     /* the last two NULL like the running ones */
};

static INLINE void batch_norm_of(const struct batch_norm *norm, int64_t from, int64_t to, int narrow) {
    struct channel channel = {norm->batch, norm->length, norm->channels * norm->length};
    double count = (double)(norm->batch * norm->length);
    for (int64_t c = from; c < to; c++) {
        int64_t at = c * norm->length;
        struct sums sums = sums_of(channel, norm->x, norm->x, at, narrow);
        double mean = sums.first / count, squares = not_negative(sums.products - mean * sums.first);
        double rstd = 1 / sqrt(squares / count + norm->eps);
        norm->mean[c] = (float)mean;
        norm->rstd[c] = (float)rstd;
        if (norm->running_mean != NULL) {
            double keep = 1 - norm->momentum;
            norm->new_running_mean[c] = (float)(norm->momentum * mean + keep * norm->running_mean[c]);
            norm->new_running_var[c] = (float)(norm->momentum * (squares / fmax(count - 1, 1)) + keep * norm->running_var[c]);
        }
        double scaled = norm->weight == NULL ? rstd : rstd * norm->weight[c];
        float shift = (float)mean, scale = (float)scaled; /* what rounds off the mean, is in the offset */
        float offset = (float)((norm->bias == NULL ? 0 : norm->bias[c]) - (mean - shift) * scaled);
        for (int64_t row = 0; row < channel.rows; row++, at += channel.stride) {
            _Pragma("GCC ivdep")
            for (int64_t i = at; i < at + channel.length; i++) {
                put(norm->y, i, (get(norm->x, i, narrow) - shift) * scale + offset, narrow);
            }
        }
    }
}

struct batch_norm_backward {
    int narrow; /* g, x and of_x are bfloat16 */
    int64_t batch, channels, length;
    const void *g, *x;
    void *of_x;
    const float *mean, *rstd, *weight; /* weight may be NULL */
    float *of_weight, *of_bias;
};

/* The derivative through (x - mean) * rstd: g without its mean and its component along that. */
static INLINE void batch_norm_backward_of(const struct batch_norm_backward *norm, int64_t from, int64_t to, int narrow) {
    struct channel channel = {norm->batch, norm->length, norm->channels * norm->length};
    double count = (double)(norm->batch * norm->length);
    for (int64_t c = from; c < to; c++) {
        int64_t at = c * norm->length;
        float mean = norm->mean[c], rstd = norm->rstd[c];
        struct sums sums = sums_of(channel, norm->g, norm->x, at, narrow);
        double along = (sums.products - mean * sums.first) * rstd;
        norm->of_bias[c] = (float)sums.first;
        norm->of_weight[c] = (float)along;
        float shift = (float)(sums.first / count), slope = (float)(along / count * rstd);
        float scale = norm->weight == NULL ? rstd : rstd * norm->weight[c];
        for (int64_t row = 0; row < channel.rows; row++, at += channel.stride) {
            _Pragma("GCC ivdep")
            for (int64_t i = at; i < at + channel.length; i++) {
                float g = get(norm->g, i, narrow), x = get(norm->x, i, narrow);
                put(norm->of_x, i, (g - shift - (x - mean) * slope) * scale, narrow);
            }
        }
    }
}

/* Defines the function `name`, which does what `name`_of does, compiled for either type of elements. */
#define BY_ELEMENTS(name, of)                                                                     \
    static INLINE void name##_inline(const struct of *norm, int64_t from, int64_t to) {           \
        if (norm->narrow) {                                                                       \
            name##_of(norm, from, to, 1);                                                         \
        } else {                                                                                  \
            name##_of(norm, from, to, 0);                                                         \
        }                                                                                         \
    }                                                                                             \
    BY_PROCESSOR(name, (const struct of *norm, int64_t from, int64_t to), (norm, from, to))

BY_ELEMENTS(batch_norm, batch_norm)
BY_ELEMENTS(batch_norm_backward, batch_norm_backward)

/* Rows of arrays. In a group normalization, each is some channels of one element of the batch: `length` is `channels` times
 * `repeat`, and weight and bias have one number for each of the channels of all `groups`. Otherwise `repeat` is 0: they have
 * one for each element of a row. */
struct rows {
    int64_t count, length, groups, channels, repeat;
    int centered; /* or it is an RMS normalization, which subtracts no mean, and has none */
};

/* The first channel of row r. */
static INLINE int64_t first_channel(const struct rows *rows, int64_t r) { return r % rows->groups * rows->channels; }

/* What weight and bias have for element i of a row or, if there is one for `each` channel only, for all of its elements. */
static INLINE float of_vector(const float *vector, int64_t i, int each) { return vector[each ? i : 0]; }

struct row_norm {
    int narrow; /* x and y are bfloat16 */
    struct rows rows;
    double eps;
    const void *x;
    void *y;
    const float *weight, *bias; /* may be NULL */
    float *mean, *rstd;
};

static INLINE void normalize_row(void *y, const void *x, int64_t at, int64_t length, float shift, float scale,
                                 const float *weight, const float *bias, int each, int narrow) {
    for (int64_t i = 0; i < length; i++) {
        float normed = (get(x, at + i, narrow) - shift) * scale;
        float scaled = weight == NULL ? normed : normed * of_vector(weight, i, each);
        put(y, at + i, bias == NULL ? scaled : scaled + of_vector(bias, i, each), narrow);
    }
}

static INLINE void row_norm_of(const struct row_norm *norm, int64_t from, int64_t to, int narrow) {
    const struct rows *rows = &norm->rows;
    struct channel row = {1, rows->length, 0};
    double count = (double)rows->length;
    for (int64_t r = from; r < to; r++) {
        int64_t at = r * rows->length;
        const float *weight = norm->weight, *bias = norm->bias;
        struct sums sums = sums_of(row, norm->x, norm->x, at, narrow);
        double mean = rows->centered ? sums.first / count : 0;
        double variance = not_negative(sums.products - mean * sums.first) / count;
        float shift = (float)mean, scale = (float)(1 / sqrt(variance + norm->eps));
        norm->rstd[r] = scale;
        if (rows->centered) {
            norm->mean[r] = shift;
        }
        if (rows->repeat == 0) {
            normalize_row(norm->y, norm->x, at, row.length, shift, scale, weight, bias, 1, narrow);
            continue;
        }
        for (int64_t c = first_channel(rows, r), end = c + rows->channels; c < end; c++, at += rows->repeat) {
            normalize_row(norm->y, norm->x, at, rows->repeat, shift, scale, weight == NULL ? NULL : weight + c,
                          bias == NULL ? NULL : bias + c, 0, narrow);
        }
    }
}

struct row_norm_backward {
    int narrow; /* g, x and of_x are bfloat16 */
    struct rows rows;
    const void *g, *x;
    void *of_x;                        /* NULL if not wanted, like the next two */
    float *of_weight, *of_bias;
    const float *mean, *rstd, *weight; /* mean only if centered; weight may be NULL */
};

/* The sum of g * weight, and of that times x, from element `at` on. */
static INLINE struct sums weighted_sums(const void *g, const float *weight, const void *x, int64_t at, int64_t length,
                                        int narrow) {
    doubles first = {0}, products = {0};
    struct sums sums;
    int64_t i = 0;
    for (; i + 8 <= length; i += 8) {
        floats of_g, of_x;
        get_8(&of_g, g, at + i, narrow);
        get_8(&of_x, x, at + i, narrow);
        doubles a = __builtin_convertvector(of_g * *(const floats *)(weight + i), doubles);
        first += a;
        products += a * __builtin_convertvector(of_x, doubles);
    }
    sums.first = sum_of_lanes(&first);
    sums.products = sum_of_lanes(&products);
    for (; i < length; i++) {
        float scaled = get(g, at + i, narrow) * weight[i];
        sums.first += scaled;
        sums.products += (double)scaled * get(x, at + i, narrow);
    }
    return sums;
}

static INLINE void derive_row(const struct row_norm_backward *norm, int64_t at, int64_t length, float shift, float mean,
                              float slope, float rstd, const float *weight, int each, int narrow) {
    for (int64_t i = 0; i < length; i++) {
        float g = get(norm->g, at + i, narrow), scaled = weight == NULL ? g : g * of_vector(weight, i, each);
        put(norm->of_x, at + i, (scaled - shift - (get(norm->x, at + i, narrow) - mean) * slope) * rstd, narrow);
    }
}

/* The derivative of rows by the input: as for a channel. */
static INLINE void row_norm_backward_of(const struct row_norm_backward *norm, int64_t from, int64_t to, int narrow) {
    const struct rows *rows = &norm->rows;
    int64_t length = rows->repeat == 0 ? rows->length : rows->repeat;
    struct channel part = {1, length, 0};
    double count = (double)rows->length;
    for (int64_t r = from; r < to; r++) {
        const float *weight = norm->weight;
        float mean = rows->centered ? norm->mean[r] : 0, rstd = norm->rstd[r];
        int64_t at = r * rows->length, first = first_channel(rows, r), parts = rows->repeat == 0 ? 1 : rows->channels;
        struct sums sums = {0, 0};
        for (int64_t k = 0; k < parts; k++) {
            struct sums more = weight != NULL && rows->repeat == 0
                                   ? weighted_sums(norm->g, weight, norm->x, at, length, narrow)
                                   : sums_of(part, norm->g, norm->x, at + k * length, narrow);
            double by = weight != NULL && rows->repeat != 0 ? weight[first + k] : 1;
            sums.first += more.first * by;
            sums.products += more.products * by;
        }
        double along = (sums.products - mean * sums.first) * rstd;
        float shift = rows->centered ? (float)(sums.first / count) : 0, slope = (float)(along / count * rstd);
        if (rows->repeat == 0) {
            derive_row(norm, at, length, shift, mean, slope, rstd, weight, 1, narrow);
            continue;
        }
        for (int64_t k = 0; k < parts; k++) {
            derive_row(norm, at + k * length, length, shift, mean, slope, rstd,
                       weight == NULL ? NULL : weight + first + k, 0, narrow);
        }
    }
}

enum { MOST_COLUMNS = 512, ROWS_AT_ONCE = 32 }; /* of sums that are in the first level of the cache, in single precision */

static INLINE void set(float *vector, int64_t i, double value) {
    if (vector != NULL) {
        vector[i] = (float)value;
    }
}

/* The derivatives by weight and bias, of columns `from` to `to`: sums over all rows. */
static INLINE void sums_of_columns(const struct row_norm_backward *norm, int64_t from, int64_t to, int narrow) {
    const struct rows *rows = &norm->rows;
    for (; from < to; from += MOST_COLUMNS) {
        int count = to - from < MOST_COLUMNS ? (int)(to - from) : MOST_COLUMNS;
        double of_weight[MOST_COLUMNS] = {0}, of_bias[MOST_COLUMNS] = {0};
        for (int64_t r = 0; r < rows->count;) {
            float some_of_weight[MOST_COLUMNS] = {0}, some_of_bias[MOST_COLUMNS] = {0};
            for (int64_t end = r + ROWS_AT_ONCE; r < rows->count && r < end; r++) {
                int64_t at = r * rows->length + from;
                float mean = rows->centered ? norm->mean[r] : 0, rstd = norm->rstd[r];
                for (int i = 0; i < count; i++) {
                    float g = get(norm->g, at + i, narrow);
                    some_of_weight[i] += g * ((get(norm->x, at + i, narrow) - mean) * rstd);
                    some_of_bias[i] += g;
                }
            }
            for (int i = 0; i < count; i++) {
                of_weight[i] += some_of_weight[i];
                of_bias[i] += some_of_bias[i];
            }
        }
        for (int i = 0; i < count; i++) {
            set(norm->of_weight, from + i, of_weight[i]);
            set(norm->of_bias, from + i, of_bias[i]);
        }
    }
}

/* The same of channels `from` to `to`. */
static INLINE void sums_of_channels(const struct row_norm_backward *norm, int64_t from, int64_t to, int narrow) {
    const struct rows *rows = &norm->rows;
    struct channel part = {1, rows->repeat, 0};
    for (int64_t c = from; c < to; c++) {
        double of_weight = 0, of_bias = 0;
        for (int64_t r = c / rows->channels; r < rows->count; r += rows->groups) {
            int64_t at = r * rows->length + c % rows->channels * rows->repeat;
            struct sums sums = sums_of(part, norm->g, norm->x, at, narrow);
            of_weight += (sums.products - norm->mean[r] * sums.first) * norm->rstd[r];
            of_bias += sums.first;
        }
        set(norm->of_weight, c, of_weight);
        set(norm->of_bias, c, of_bias);
    }
}

static INLINE void row_norm_sums_of(const struct row_norm_backward *norm, int64_t from, int64_t to, int narrow) {
    if (norm->rows.repeat == 0) {
        sums_of_columns(norm, from, to, narrow);
    } else {
        sums_of_channels(norm, from, to, narrow);
    }
}

BY_ELEMENTS(row_norm, row_norm)
BY_ELEMENTS(row_norm_backward, row_norm_backward)
BY_ELEMENTS(row_norm_sums, row_norm_backward)
