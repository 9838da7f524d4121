/* Passes over gradients in bf16 and fp32: whether all elements are finite, their squares' sum, scaled copies, sums. */
#include "bf16.h"

#define BLOCK 16384 /* elements of a partial sum, which therefore does not depend on the number of threads */

static inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* find_not_finite_TYPE: *found = 1 if an element is NaN or infinite: all bits of its exponent are set; else 0.
 * sum_squares_TYPE: partial[b] = the sum of squares of block b; there are ceil(count / BLOCK) blocks. */
#define PASSES(TYPE, BITS, EXPONENT, VALUE)                                                                            \
    void find_not_finite_##TYPE(const BITS *x, int64_t *found, int64_t count) {                                        \
        int any = 0;                                                                                                   \
        _Pragma("omp parallel for simd schedule(static) reduction(| : any)") for (int64_t i = 0; i < count; i++) any |= \
            (x[i] & EXPONENT) == EXPONENT;                                                                             \
        *found = any;                                                                                                  \
    }                                                                                                                  \
    void sum_squares_##TYPE(const BITS *x, double *partial, int64_t count) {                                           \
        _Pragma("omp parallel for schedule(static)") for (int64_t first = 0; first < count; first += BLOCK) {          \
            int64_t last = first + BLOCK < count ? first + BLOCK : count;                                              \
            double sum = 0.0;                                                                                          \
            _Pragma("omp simd reduction(+ : sum)") for (int64_t i = first; i < last; i++) {                            \
                double v = VALUE(x[i]);                                                                                \
                sum += v * v;                                                                                          \
            }                                                                                                          \
            partial[first / BLOCK] = sum;                                                                              \
        }                                                                                                              \
    }                                                                                                                  \
    void scale_to_float_##TYPE(const BITS *restrict x, float *restrict out, int64_t count, float scale) {              \
        _Pragma("omp parallel for simd schedule(static)") for (int64_t i = 0; i < count; i++) out[i] =                 \
            VALUE(x[i]) * scale;                                                                                       \
    }

PASSES(bf16, uint16_t, 0x7f80, to_float)
PASSES(fp32, uint32_t, 0x7f800000, bits_to_float)

void multiply_bf16(uint16_t *x, int64_t count, float factor) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++)
        x[i] = to_bf16(to_float(x[i]) * factor);
}

/* Add x [rows, columns] to columns of a matrix in fp32 whose rows are `pitch` elements apart. */
void add_bf16(const uint16_t *restrict x, float *restrict sum, int64_t rows, int64_t columns, int64_t pitch) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < columns; i++)
            sum[row * pitch + i] += to_float(x[row * columns + i]);
}
