/* Normalizations of float32 arrays: see norms.py. Batch normalization of (batch, channels, ...), one channel after another;
 * layer and RMS normalization of (rows, length), one row after another.
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

struct row_norm {
    int64_t rows, length;
    int centered; /* layer normalization; else RMS normalization, which subtracts no mean, and has none */
    double eps;
    const float *x, *weight, *bias; /* the last two may be NULL */
    float *y, *mean, *rstd;
};

static INLINE void row_norm_inline(const struct row_norm *norm, int64_t from, int64_t to) {
    struct channel row = {1, norm->length, 0};
    double count = (double)norm->length;
    for (int64_t r = from; r < to; r++) {
        const float *x = norm->x + r * norm->length, *weight = norm->weight, *bias = norm->bias;
        float *y = norm->y + r * norm->length;
        struct sums sums = sums_of(row, x, x);
        double mean = norm->centered ? sums.first / count : 0;
        float shift = (float)mean, scale = (float)(1 / sqrt(not_negative(sums.products - mean * sums.first) / count + norm->eps));
        norm->rstd[r] = scale;
        if (norm->centered) {
            norm->mean[r] = shift;
        }
        for (int64_t i = 0; i < row.length; i++) {
            float normed = (x[i] - shift) * scale, scaled = weight == NULL ? normed : normed * weight[i];
            y[i] = bias == NULL ? scaled : scaled + bias[i];
        }
    }
}

struct row_norm_backward {
    int64_t rows, length;
    int centered;
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

/* The derivative of rows by the input: as for a channel. */
static INLINE void row_norm_backward_inline(const struct row_norm_backward *norm, int64_t from, int64_t to) {
    struct channel row = {1, norm->length, 0};
    double count = (double)norm->length;
    for (int64_t r = from; r < to; r++) {
        const float *g = norm->g + r * norm->length, *x = norm->x + r * norm->length, *weight = norm->weight;
        float *of_x = norm->of_x + r * norm->length, mean = norm->centered ? norm->mean[r] : 0, rstd = norm->rstd[r];
        struct sums sums = weight == NULL ? sums_of(row, g, x) : weighted_sums(g, weight, x, row.length);
        double along = (sums.products - mean * sums.first) * rstd;
        float shift = norm->centered ? (float)(sums.first / count) : 0, slope = (float)(along / count * rstd);
        for (int64_t i = 0; i < row.length; i++) {
            float scaled = weight == NULL ? g[i] : g[i] * weight[i];
            of_x[i] = (scaled - shift - (x[i] - mean) * slope) * rstd;
        }
    }
}

enum { MOST_COLUMNS = 512, ROWS_AT_ONCE = 32 }; /* of sums that are in the first level of the cache, in single precision */

/* The derivatives by weight and bias: sums over all rows, of columns `from` to `to`. */
static INLINE void row_norm_sums_inline(const struct row_norm_backward *norm, int64_t from, int64_t to) {
    for (; from < to; from += MOST_COLUMNS) {
        int count = to - from < MOST_COLUMNS ? (int)(to - from) : MOST_COLUMNS;
        double of_weight[MOST_COLUMNS] = {0}, of_bias[MOST_COLUMNS] = {0};
        for (int64_t r = 0; r < norm->rows;) {
            float some_of_weight[MOST_COLUMNS] = {0}, some_of_bias[MOST_COLUMNS] = {0};
            for (int64_t end = r + ROWS_AT_ONCE; r < norm->rows && r < end; r++) {
                const float *g = norm->g + r * norm->length + from, *x = norm->x + r * norm->length + from;
                float mean = norm->centered ? norm->mean[r] : 0, rstd = norm->rstd[r];
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
            if (norm->of_weight != NULL) {
                norm->of_weight[from + i] = (float)of_weight[i];
            }
            if (norm->of_bias != NULL) {
                norm->of_bias[from + i] = (float)of_bias[i];
            }
        }
    }
}

BY_PROCESSOR(row_norm, (const struct row_norm *norm, int64_t from, int64_t to), (norm, from, to))
BY_PROCESSOR(row_norm_backward, (const struct row_norm_backward *norm, int64_t from, int64_t to), (norm, from, to))
BY_PROCESSOR(row_norm_sums, (const struct row_norm_backward *norm, int64_t from, int64_t to), (norm, from, to))
