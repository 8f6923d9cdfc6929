/* Normalizations of float32 arrays: see norms.py. Batch normalization of (batch, channels, ...), one channel after another;
 * layer, RMS and group normalization of (rows, length), one row after another.
 *
 * As in PyTorch's kernels, sums are in double precision. So one pass gives both sums of a channel: subtracting the mean
 * afterwards loses less than the elements have lost by being float32. */

#include <math.h>
#include <stdint.h>

#include "_processor.h"

typedef float floats __attribute__((vector_size(32), aligned(4)));
typedef double doubles __attribute__((vector_size(64)));

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

/* The sum of u, and of u * v. */
static INLINE struct sums sums_of(struct channel channel, const float *u, const float *v) {
    doubles first[2] = {{0}, {0}}, products[2] = {{0}, {0}};
    struct sums sums = {0, 0};
    for (int64_t row = 0; row < channel.rows; row++, u += channel.stride, v += channel.stride) {
        int64_t i = 0;
        for (; i + 16 <= channel.length; i += 16) {
            for (int half = 0; half < 2; half++) {
                doubles a = __builtin_convertvector(*(const floats *)(u + i + 8 * half), doubles);
                doubles b = __builtin_convertvector(*(const floats *)(v + i + 8 * half), doubles);
                first[half] += a;
                products[half] += a * b;
            }
        }
        for (; i < channel.length; i++) {
            sums.first += u[i];
            sums.products += (double)u[i] * v[i];
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
    int64_t batch, channels, length;
    double eps, momentum;
    const float *x, *weight, *bias, *running_mean, *running_var;      /* all but x may be NULL */
    float *y, *mean, *rstd, *new_running_mean, *new_running_var;      /* NULL like the running ones */
};

static INLINE void batch_norm_inline(const struct batch_norm *norm, int64_t from, int64_t to) {
    struct channel channel = {norm->batch, norm->length, norm->channels * norm->length};
    double count = (double)(norm->batch * norm->length);
    for (int64_t c = from; c < to; c++) {
        const float *x = norm->x + c * norm->length;
        float *y = norm->y + c * norm->length;
        struct sums sums = sums_of(channel, x, x);
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
        for (int64_t row = 0; row < channel.rows; row++, x += channel.stride, y += channel.stride) {
            _Pragma("GCC ivdep")
            for (int64_t i = 0; i < channel.length; i++) {
                y[i] = (x[i] - shift) * scale + offset;
            }
        }
    }
}

struct batch_norm_backward {
    int64_t batch, channels, length;
    const float *g, *x, *mean, *rstd, *weight; /* weight may be NULL */
    float *of_x, *of_weight, *of_bias;
};

/* The derivative through (x - mean) * rstd: g without its mean and its component along that. */
static INLINE void batch_norm_backward_inline(const struct batch_norm_backward *norm, int64_t from, int64_t to) {
    struct channel channel = {norm->batch, norm->length, norm->channels * norm->length};
    double count = (double)(norm->batch * norm->length);
    for (int64_t c = from; c < to; c++) {
        const float *g = norm->g + c * norm->length, *x = norm->x + c * norm->length;
        float *of_x = norm->of_x + c * norm->length, mean = norm->mean[c], rstd = norm->rstd[c];
        struct sums sums = sums_of(channel, g, x);
        double along = (sums.products - mean * sums.first) * rstd;
        norm->of_bias[c] = (float)sums.first;
        norm->of_weight[c] = (float)along;
        float shift = (float)(sums.first / count), slope = (float)(along / count * rstd);
        float scale = norm->weight == NULL ? rstd : rstd * norm->weight[c];
        for (int64_t row = 0; row < channel.rows; row++, g += channel.stride, x += channel.stride, of_x += channel.stride) {
            _Pragma("GCC ivdep")
            for (int64_t i = 0; i < channel.length; i++) {
                of_x[i] = (g[i] - shift - (x[i] - mean) * slope) * scale;
            }
        }
    }
}

BY_PROCESSOR(batch_norm, (const struct batch_norm *norm, int64_t from, int64_t to), (norm, from, to))
BY_PROCESSOR(batch_norm_backward, (const struct batch_norm_backward *norm, int64_t from, int64_t to), (norm, from, to))

/* Rows of arrays. In a group normalization, each is some channels of one element of the batch: `length` is `channels` times
 * `repeat`, and weight and bias have one number for each of the channels of all `groups`. Otherwise `repeat` is 0: they have
 * one for each element of a row. */
struct rows {
    int64_t count, length, groups, channels, repeat;
    int centered; /* or it is an RMS normalization, which subtracts no mean, and has none */
};

/* The first channel of row r. */
static INLINE int64_t first_channel(const struct rows *rows, int64_t r) { return r % rows->groups * rows->channels; }

struct row_norm {
    struct rows rows;
    double eps;
    const float *x, *weight, *bias; /* the last two may be NULL */
    float *y, *mean, *rstd;
};

static INLINE void normalize_row(float *y, const float *x, int64_t length, float shift, float scale, const float *weight,
                                 const float *bias, int each) {
    for (int64_t i = 0; i < length; i++) {
        float normed = (x[i] - shift) * scale, scaled = weight == NULL ? normed : normed * weight[each ? i : 0];
        y[i] = bias == NULL ? scaled : scaled + bias[each ? i : 0];
    }
}

static INLINE void row_norm_inline(const struct row_norm *norm, int64_t from, int64_t to) {
    const struct rows *rows = &norm->rows;
    struct channel row = {1, rows->length, 0};
    double count = (double)rows->length;
    for (int64_t r = from; r < to; r++) {
        const float *x = norm->x + r * rows->length, *weight = norm->weight, *bias = norm->bias;
        float *y = norm->y + r * rows->length;
        struct sums sums = sums_of(row, x, x);
        double mean = rows->centered ? sums.first / count : 0;
        double variance = not_negative(sums.products - mean * sums.first) / count;
        float shift = (float)mean, scale = (float)(1 / sqrt(variance + norm->eps));
        norm->rstd[r] = scale;
        if (rows->centered) {
            norm->mean[r] = shift;
        }
        if (rows->repeat == 0) {
            normalize_row(y, x, row.length, shift, scale, weight, bias, 1);
            continue;
        }
        for (int64_t c = first_channel(rows, r), end = c + rows->channels; c < end; c++) {
            normalize_row(y, x, rows->repeat, shift, scale, weight == NULL ? NULL : weight + c,
                          bias == NULL ? NULL : bias + c, 0);
            x += rows->repeat;
            y += rows->repeat;
        }
    }
}

struct row_norm_backward {
    struct rows rows;
    const float *g, *x, *mean, *rstd, *weight; /* mean only if centered; weight may be NULL */
    float *of_x, *of_weight, *of_bias;         /* NULL if not wanted */
};

/* The sum of g * weight, and of that times x. */
static INLINE struct sums weighted_sums(const float *g, const float *weight, const float *x, int64_t length) {
    doubles first = {0}, products = {0};
    struct sums sums;
    int64_t i = 0;
    for (; i + 8 <= length; i += 8) {
        floats scaled = *(const floats *)(g + i) * *(const floats *)(weight + i);
        doubles a = __builtin_convertvector(scaled, doubles);
        first += a;
        products += a * __builtin_convertvector(*(const floats *)(x + i), doubles);
    }
    sums.first = sum_of_lanes(&first);
    sums.products = sum_of_lanes(&products);
    for (; i < length; i++) {
        float scaled = g[i] * weight[i];
        sums.first += scaled;
        sums.products += (double)scaled * x[i];
    }
    return sums;
}

static INLINE void derive_row(float *of_x, const float *g, const float *x, int64_t length, float shift, float mean,
                              float slope, float rstd, const float *weight, int each) {
    for (int64_t i = 0; i < length; i++) {
        float scaled = weight == NULL ? g[i] : g[i] * weight[each ? i : 0];
        of_x[i] = (scaled - shift - (x[i] - mean) * slope) * rstd;
    }
}

/* The derivative of rows by the input: as for a channel. */
static INLINE void row_norm_backward_inline(const struct row_norm_backward *norm, int64_t from, int64_t to) {
    const struct rows *rows = &norm->rows;
    int64_t length = rows->repeat == 0 ? rows->length : rows->repeat;
    struct channel part = {1, length, 0};
    double count = (double)rows->length;
    for (int64_t r = from; r < to; r++) {
        const float *g = norm->g + r * rows->length, *x = norm->x + r * rows->length, *weight = norm->weight;
        float *of_x = norm->of_x + r * rows->length, mean = rows->centered ? norm->mean[r] : 0, rstd = norm->rstd[r];
        int64_t first = first_channel(rows, r), parts = rows->repeat == 0 ? 1 : rows->channels;
        struct sums sums = {0, 0};
        for (int64_t k = 0; k < parts; k++) {
            struct sums more = weight != NULL && rows->repeat == 0 ? weighted_sums(g, weight, x, length)
                                                                   : sums_of(part, g + k * length, x + k * length);
            double by = weight != NULL && rows->repeat != 0 ? weight[first + k] : 1;
            sums.first += more.first * by;
            sums.products += more.products * by;
        }
        double along = (sums.products - mean * sums.first) * rstd;
        float shift = rows->centered ? (float)(sums.first / count) : 0, slope = (float)(along / count * rstd);
        if (rows->repeat == 0) {
            derive_row(of_x, g, x, length, shift, mean, slope, rstd, weight, 1);
            continue;
        }
        for (int64_t k = 0; k < parts; k++) {
            derive_row(of_x + k * length, g + k * length, x + k * length, length, shift, mean, slope, rstd,
                       weight == NULL ? NULL : weight + first + k, 0);
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
static INLINE void sums_of_columns(const struct row_norm_backward *norm, int64_t from, int64_t to) {
    const struct rows *rows = &norm->rows;
    for (; from < to; from += MOST_COLUMNS) {
        int count = to - from < MOST_COLUMNS ? (int)(to - from) : MOST_COLUMNS;
        double of_weight[MOST_COLUMNS] = {0}, of_bias[MOST_COLUMNS] = {0};
        for (int64_t r = 0; r < rows->count;) {
            float some_of_weight[MOST_COLUMNS] = {0}, some_of_bias[MOST_COLUMNS] = {0};
            for (int64_t end = r + ROWS_AT_ONCE; r < rows->count && r < end; r++) {
                const float *g = norm->g + r * rows->length + from, *x = norm->x + r * rows->length + from;
                float mean = rows->centered ? norm->mean[r] : 0, rstd = norm->rstd[r];
                for (int i = 0; i < count; i++) {
                    some_of_weight[i] += g[i] * ((x[i] - mean) * rstd);
                    some_of_bias[i] += g[i];
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
static INLINE void sums_of_channels(const struct row_norm_backward *norm, int64_t from, int64_t to) {
    const struct rows *rows = &norm->rows;
    struct channel part = {1, rows->repeat, 0};
    for (int64_t c = from; c < to; c++) {
        double of_weight = 0, of_bias = 0;
        for (int64_t r = c / rows->channels; r < rows->count; r += rows->groups) {
            int64_t at = r * rows->length + c % rows->channels * rows->repeat;
            struct sums sums = sums_of(part, norm->g + at, norm->x + at);
            of_weight += (sums.products - norm->mean[r] * sums.first) * norm->rstd[r];
            of_bias += sums.first;
        }
        set(norm->of_weight, c, of_weight);
        set(norm->of_bias, c, of_bias);
    }
}

static INLINE void row_norm_sums_inline(const struct row_norm_backward *norm, int64_t from, int64_t to) {
    if (norm->rows.repeat == 0) {
        sums_of_columns(norm, from, to);
    } else {
        sums_of_channels(norm, from, to);
    }
}

BY_PROCESSOR(row_norm, (const struct row_norm *norm, int64_t from, int64_t to), (norm, from, to))
BY_PROCESSOR(row_norm_backward, (const struct row_norm_backward *norm, int64_t from, int64_t to), (norm, from, to))
BY_PROCESSOR(row_norm_sums, (const struct row_norm_backward *norm, int64_t from, int64_t to), (norm, from, to))
