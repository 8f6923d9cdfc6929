/* Programs of elementwise operations on arrays of equal length: see elementwise_call.py.
 *
 * They are run on one block of elements after another. What an operation of a block leaves is in the cache for the next one,
 * so memory is read and written once. Each operation rounds its result, like PyTorch's kernels, which run one by one. */

#include <math.h>
#include <stdint.h>

#include "_processor.h"

/* In the order of elementwise_call.py. */
enum opcode { COPY, NEG, ABS, SQRT, SQUARE, ADD, SUB, MUL, DIV, MAX, MIN };

/* Where an operand or a result is: an argument or result of the call, a single number, or a block that is dropped. */
enum storage { ARGUMENT, NUMBER, RESULT, SCRATCH };

struct place {
    int32_t storage, number;
};

struct instruction {
    int64_t opcode;
    struct place to, a, b;
};

enum { BLOCK = 512, MOST_SCRATCH = 8 }; /* of 4 KB, which stay in the first level of the cache */

/* Instructions of single numbers, in the order of elementwise_call.py. They are computed in double precision: sums, products,
 * quotients and roots of floats that are rounded to a float afterwards are those of single precision. */
enum number_opcode {
    N_CONSTANT, N_ROUND, N_NEG, N_ABS, N_SQRT, N_NOT, N_ADD, N_SUB, N_MUL, N_DIV, N_MAX, N_MIN, N_POW,
    N_EQ, N_NE, N_LT, N_LE, N_GT, N_GE, N_AND, N_OR, N_SELECT_N
};

struct number_instruction {
    int64_t opcode;
    union {
        int64_t operands[3];
        double constant;
    };
};

enum { MOST_NUMBERS = 64 };

/* Appends the results to the numbers that are given. */
static void compute_numbers(const struct number_instruction *program, int64_t length, double *numbers, int64_t given) {
    for (int64_t i = 0; i < length; i++) {
        const struct number_instruction now = program[i];
        double *to = numbers + given + i;
        if (now.opcode == N_CONSTANT) {
            *to = now.constant;
            continue;
        }
        double a = numbers[now.operands[0]], b = numbers[now.operands[1]];
        switch (now.opcode) {
        case N_ROUND: *to = (float)a; break;
        case N_NEG: *to = -a; break;
        case N_ABS: *to = fabs(a); break;
        case N_SQRT: *to = sqrt(a); break;
        case N_NOT: *to = a == 0; break;
        case N_ADD: *to = a + b; break;
        case N_SUB: *to = a - b; break;
        case N_MUL: *to = a * b; break;
        case N_DIV: *to = a / b; break;
        case N_MAX: *to = a != a || b != b ? a + b : a > b ? a : b; break;
        case N_MIN: *to = a != a || b != b ? a + b : a < b ? a : b; break;
        case N_POW: *to = pow(a, b); break;
        case N_EQ: *to = a == b; break;
        case N_NE: *to = a != b; break;
        case N_LT: *to = a < b; break;
        case N_LE: *to = a <= b; break;
        case N_GT: *to = a > b; break;
        case N_GE: *to = a >= b; break;
        case N_AND: *to = a != 0 && b != 0; break;
        case N_OR: *to = a != 0 || b != 0; break;
        case N_SELECT_N: *to = a != 0 ? numbers[now.operands[2]] : b; break;
        }
    }
}

/* Everything that an instruction can refer to. */
struct arrays {
    float **arguments, **results, *numbers;
};

/* NaN if either is, like PyTorch's maximum and minimum. */
static inline float larger(float a, float b) { return a != a || b != b ? a + b : a > b ? a : b; }

static inline float smaller(float a, float b) { return a != a || b != b ? a + b : a < b ? a : b; }

/* A result may be in the place of an operand, but never overlaps one otherwise: that is what ivdep tells the compiler. */
#define EACH(value)                   \
    _Pragma("GCC ivdep")              \
    for (int i = 0; i < count; i++) { \
        to[i] = value;                \
    }                                 \
    break

#define UNARY(opcode, value)  \
    case opcode: {            \
        const float *x = a;   \
        EACH(value);          \
    }

#define BINARY(opcode, f)         \
    case opcode:                  \
        if (one_a) {              \
            const float x = *a;   \
            EACH(f(x, b[i]));     \
        } else if (one_b) {       \
            const float y = *b;   \
            EACH(f(a[i], y));     \
        } else {                  \
            EACH(f(a[i], b[i]));  \
        }

#define SUM(x, y) ((x) + (y))
#define DIFFERENCE(x, y) ((x) - (y))
#define PRODUCT_OF(x, y) ((x) * (y))
#define QUOTIENT(x, y) ((x) / (y))

static INLINE void compute(int64_t opcode, int count, float *to, const float *a, int one_a, const float *b, int one_b) {
    switch (opcode) {
        UNARY(COPY, x[i])
        UNARY(NEG, -x[i])
        UNARY(ABS, fabsf(x[i]))
        UNARY(SQRT, sqrtf(x[i]))
        UNARY(SQUARE, x[i] * x[i])
        BINARY(ADD, SUM)
        BINARY(SUB, DIFFERENCE)
        BINARY(MUL, PRODUCT_OF)
        BINARY(DIV, QUOTIENT)
        BINARY(MAX, larger)
        BINARY(MIN, smaller)
    }
}

static INLINE void run_blocks_inline(const struct instruction *program, int length, struct arrays arrays, int64_t from,
                                     int64_t to) {
    float scratch[MOST_SCRATCH][BLOCK];
    for (; from < to; from += BLOCK) {
        int count = to - from < BLOCK ? (int)(to - from) : BLOCK;
        for (const struct instruction *now = program; now < program + length; now++) {
            const struct place places[3] = {now->to, now->a, now->b};
            float *at[3];
            for (int i = 0; i < 3; i++) {
                int n = places[i].number;
                at[i] = places[i].storage == ARGUMENT ? arrays.arguments[n] + from
                        : places[i].storage == RESULT ? arrays.results[n] + from
                        : places[i].storage == NUMBER ? arrays.numbers + n
                                                      : scratch[n];
            }
            compute(now->opcode, count, at[0], at[1], now->a.storage == NUMBER, at[2], now->b.storage == NUMBER);
        }
    }
}

BY_PROCESSOR(run_blocks, (const struct instruction *program, int length, struct arrays arrays, int64_t from, int64_t to),
             (program, length, arrays, from, to))
