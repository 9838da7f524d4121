/* LayerNorm and RMSNorm of rows, with the addition before them, and their backward pass with the gradient of the sum.
 *
 * y = (x - mean) scale (weight + offset) + bias,  scale = 1 / sqrt(variance + eps); RMSNorm has a mean of 0, no bias
 * with g = dy (weight + offset) and z = (x - mean) scale:  dx = scale (g - mean(g) - z mean(g z)); RMSNorm: no mean(g)
 * All in fp32, of numbers in bf16 or fp32. The backward pass computes mean and scale again, so that only x is kept.
 */
#ifndef NUMBER /* the file includes itself for each type of numbers */
#include "bf16.h"
#include "columns.h"

typedef struct {
    float mean, scale;
} Statistics;

#include "as_bf16.h"
#include "norm.c"
#include "as_fp32.h"
#include "norm.c"
#else

static inline void NAMED(prefetch_next_row)(const NUMBER *row, int64_t columns) {
    for (int64_t j = 0; j < columns; j += 64 / (int64_t)sizeof(NUMBER))
        prefetch_line(row + columns + j);
}

static inline Statistics NAMED(statistics)(const NUMBER *restrict x, int64_t columns, int64_t is_rms, float eps) {
    float sum = 0.0f, squares = 0.0f, mean = 0.0f;
    if (!is_rms) {
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < columns; j++)
            sum += TO_FLOAT(x[j]);
        mean = sum / (float)columns;
    }
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < columns; j++) {
        float difference = TO_FLOAT(x[j]) - mean;
        squares += difference * difference;
    }
    return (Statistics){mean, 1.0f / sqrtf(squares / (float)columns + eps)};
}

/* out = norm(x), or with `added`: sum = x + added, out = norm(sum). added, sum and bias may be NULL. */
void NAMED(norm)(const NUMBER *restrict x, const NUMBER *restrict added, const NUMBER *restrict weight,
                 const NUMBER *restrict bias, NUMBER *restrict sum, NUMBER *restrict out, int64_t rows,
                 int64_t columns, int64_t is_rms, float eps, float offset) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const NUMBER *restrict in = x + row * columns;
        NUMBER *restrict to = out + row * columns;
        NAMED(prefetch_next_row)(in, columns), NAMED(prefetch_next_row)(to, columns);
        if (added) {
            const NUMBER *restrict other = added + row * columns;
            NUMBER *restrict total = sum + row * columns;
            NAMED(prefetch_next_row)(other, columns), NAMED(prefetch_next_row)(total, columns);
#pragma omp simd
            for (int64_t j = 0; j < columns; j++)
                total[j] = FROM_FLOAT(TO_FLOAT(in[j]) + TO_FLOAT(other[j]));
            in = total;
        }
        Statistics s = NAMED(statistics)(in, columns, is_rms, eps);
        if (bias) {
#pragma omp simd
            for (int64_t j = 0; j < columns; j++)
                to[j] = FROM_FLOAT((TO_FLOAT(in[j]) - s.mean) * s.scale * (TO_FLOAT(weight[j]) + offset) +
                                TO_FLOAT(bias[j]));
        } else {
#pragma omp simd
            for (int64_t j = 0; j < columns; j++)
                to[j] = FROM_FLOAT((TO_FLOAT(in[j]) - s.mean) * s.scale * (TO_FLOAT(weight[j]) + offset));
        }
    }
}

/* One row: dx, and the row's part of the gradients of weight and bias. `residual` is NULL or added to dx. */
static inline void NAMED(row_backward)(const NUMBER *restrict grad, const NUMBER *restrict x,
                                       const NUMBER *restrict residual, const NUMBER *restrict weight,
                                       NUMBER *restrict dx, float *restrict dweight, float *restrict dbias,
                                       int64_t columns, int64_t is_rms, float eps, float offset) {
    Statistics s = NAMED(statistics)(x, columns, is_rms, eps);
    float sum = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : sum, product)
    for (int64_t j = 0; j < columns; j++) {
        float dy = TO_FLOAT(grad[j]), z = (TO_FLOAT(x[j]) - s.mean) * s.scale;
        float g = dy * (TO_FLOAT(weight[j]) + offset);
        dweight[j] += dy * z;
        sum += g;
        product += g * z;
    }
    if (dbias)
        for (int64_t j = 0; j < columns; j++)
            dbias[j] += TO_FLOAT(grad[j]);
    float mean = is_rms ? 0.0f : sum / (float)columns;
    product /= (float)columns;
    if (residual) {
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) {
            float z = (TO_FLOAT(x[j]) - s.mean) * s.scale, g = TO_FLOAT(grad[j]) * (TO_FLOAT(weight[j]) + offset);
            dx[j] = FROM_FLOAT(s.scale * (g - mean - z * product) + TO_FLOAT(residual[j]));
        }
    } else {
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) {
            float z = (TO_FLOAT(x[j]) - s.mean) * s.scale, g = TO_FLOAT(grad[j]) * (TO_FLOAT(weight[j]) + offset);
            dx[j] = FROM_FLOAT(s.scale * (g - mean - z * product));
        }
    }
}

/* Gradients of x, weight and bias. residual (added to dx) and dbias may be NULL.
 * partial: fp32 [2, block_count(rows), columns] for the sums over rows. */
void NAMED(norm_backward)(const NUMBER *restrict grad, const NUMBER *restrict x, const NUMBER *restrict residual,
                          const NUMBER *restrict weight, float *restrict partial, NUMBER *restrict dx,
                          NUMBER *restrict dweight, NUMBER *restrict dbias, int64_t rows, int64_t columns,
                          int64_t is_rms, float eps, float offset) {
    int64_t blocks = block_count(rows);
    float *restrict partial_bias = partial + blocks * columns;
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * BLOCK_ROWS, end = smaller(first + BLOCK_ROWS, rows);
        float *weight_sum = partial + block * columns, *bias_sum = dbias ? partial_bias + block * columns : NULL;
        memset(weight_sum, 0, (size_t)columns * sizeof(float));
        if (bias_sum)
            memset(bias_sum, 0, (size_t)columns * sizeof(float));
        for (int64_t row = first; row < end; row++) {
            int64_t at = row * columns;
            NAMED(prefetch_next_row)(grad + at, columns), NAMED(prefetch_next_row)(x + at, columns);
            NAMED(prefetch_next_row)(dx + at, columns);
            if (residual)
                NAMED(prefetch_next_row)(residual + at, columns);
            NAMED(row_backward)(grad + at, x + at, residual ? residual + at : NULL, weight, dx + at, weight_sum,
                                bias_sum, columns, is_rms, eps, offset);
        }
    }
    sum_blocks(partial, blocks, columns);
    for (int64_t j = 0; j < columns; j++)
        dweight[j] = FROM_FLOAT(partial[j]);
    if (!dbias)
        return;
    sum_blocks(partial_bias, blocks, columns);
    for (int64_t j = 0; j < columns; j++)
        dbias[j] = FROM_FLOAT(partial_bias[j]);
}
#endif
