/* LayerNorm and RMSNorm of rows, with the addition before them, and their backward pass with the gradient of the sum.
 *
 * y = (x - mean) scale (weight + offset) + bias,  scale = 1 / sqrt(variance + eps); RMSNorm has a mean of 0, no bias
 * with g = dy (weight + offset) and z = (x - mean) scale:  dx = scale (g - mean(g) - z mean(g z)); RMSNorm: no mean(g)
 * All in fp32. The backward pass computes mean and scale again, so that only x is kept.
 */
#include "bf16.h"
#include "columns.h"

typedef struct {
    float mean, scale;
} Statistics;

static inline void prefetch_next_row(const uint16_t *row, int64_t columns) {
    for (int64_t j = 0; j < columns; j += 32)
        prefetch_line(row + columns + j);
}

static inline Statistics statistics(const uint16_t *restrict x, int64_t columns, int64_t is_rms, float eps) {
    float sum = 0.0f, squares = 0.0f, mean = 0.0f;
    if (!is_rms) {
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < columns; j++)
            sum += to_float(x[j]);
        mean = sum / (float)columns;
    }
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < columns; j++) {
        float difference = to_float(x[j]) - mean;
        squares += difference * difference;
    }
    return (Statistics){mean, 1.0f / sqrtf(squares / (float)columns + eps)};
}

/* out = norm(x), or with `added`: sum = x + added, out = norm(sum). added, sum and bias may be NULL. */
void norm(const uint16_t *restrict x, const uint16_t *restrict added, const uint16_t *restrict weight,
          const uint16_t *restrict bias, uint16_t *restrict sum, uint16_t *restrict out, int64_t rows, int64_t columns,
          int64_t is_rms, float eps, float offset) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const uint16_t *restrict in = x + row * columns;
        uint16_t *restrict to = out + row * columns;
        prefetch_next_row(in, columns), prefetch_next_row(to, columns);
        if (added) {
            const uint16_t *restrict other = added + row * columns;
            uint16_t *restrict total = sum + row * columns;
            prefetch_next_row(other, columns), prefetch_next_row(total, columns);
#pragma omp simd
            for (int64_t j = 0; j < columns; j++)
                total[j] = to_bf16(to_float(in[j]) + to_float(other[j]));
            in = total;
        }
        Statistics s = statistics(in, columns, is_rms, eps);
        if (bias) {
#pragma omp simd
            for (int64_t j = 0; j < columns; j++)
                to[j] = to_bf16((to_float(in[j]) - s.mean) * s.scale * (to_float(weight[j]) + offset) +
                                to_float(bias[j]));
        } else {
#pragma omp simd
            for (int64_t j = 0; j < columns; j++)
                to[j] = to_bf16((to_float(in[j]) - s.mean) * s.scale * (to_float(weight[j]) + offset));
        }
    }
}

/* One row: dx, and the row's part of the gradients of weight and bias. `residual` is NULL or added to dx. */
static inline void row_backward(const uint16_t *restrict grad, const uint16_t *restrict x,
                                const uint16_t *restrict residual, const uint16_t *restrict weight,
                                uint16_t *restrict dx, float *restrict dweight, float *restrict dbias,
                                int64_t columns, int64_t is_rms, float eps, float offset) {
    Statistics s = statistics(x, columns, is_rms, eps);
    float sum = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : sum, product)
    for (int64_t j = 0; j < columns; j++) {
        float dy = to_float(grad[j]), z = (to_float(x[j]) - s.mean) * s.scale, g = dy * (to_float(weight[j]) + offset);
        dweight[j] += dy * z;
        sum += g;
        product += g * z;
    }
    if (dbias)
        for (int64_t j = 0; j < columns; j++)
            dbias[j] += to_float(grad[j]);
    float mean = is_rms ? 0.0f : sum / (float)columns;
    product /= (float)columns;
    if (residual) {
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) {
            float z = (to_float(x[j]) - s.mean) * s.scale, g = to_float(grad[j]) * (to_float(weight[j]) + offset);
            dx[j] = to_bf16(s.scale * (g - mean - z * product) + to_float(residual[j]));
        }
    } else {
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) {
            float z = (to_float(x[j]) - s.mean) * s.scale, g = to_float(grad[j]) * (to_float(weight[j]) + offset);
            dx[j] = to_bf16(s.scale * (g - mean - z * product));
        }
    }
}

/* Gradients of x, weight and bias. residual (added to dx) and dbias may be NULL.
 * partial: fp32 [2, block_count(rows), columns] for the sums over rows. */
void norm_backward(const uint16_t *restrict grad, const uint16_t *restrict x, const uint16_t *restrict residual,
                   const uint16_t *restrict weight, float *restrict partial, uint16_t *restrict dx,
                   uint16_t *restrict dweight, uint16_t *restrict dbias, int64_t rows, int64_t columns, int64_t is_rms,
                   float eps, float offset) {
    int64_t blocks = block_count(rows);
    float *restrict partial_bias = partial + blocks * columns;
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * BLOCK_ROWS, end = first + BLOCK_ROWS < rows ? first + BLOCK_ROWS : rows;
        float *weight_sum = partial + block * columns, *bias_sum = dbias ? partial_bias + block * columns : NULL;
        memset(weight_sum, 0, (size_t)columns * sizeof(float));
        if (bias_sum)
            memset(bias_sum, 0, (size_t)columns * sizeof(float));
        for (int64_t row = first; row < end; row++) {
            int64_t at = row * columns;
            prefetch_next_row(grad + at, columns), prefetch_next_row(x + at, columns);
            prefetch_next_row(dx + at, columns);
            if (residual)
                prefetch_next_row(residual + at, columns);
            row_backward(grad + at, x + at, residual ? residual + at : NULL, weight, dx + at, weight_sum, bias_sum,
                         columns, is_rms, eps, offset);
        }
    }
    sum_blocks(partial, blocks, columns, dweight);
    if (dbias)
        sum_blocks(partial_bias, blocks, columns, dbias);
}
