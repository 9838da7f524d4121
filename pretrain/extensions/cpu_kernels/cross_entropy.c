/* Cross-entropy of logits in bf16 or fp32, and its gradient in their place.
 *
 * For each row x of logits: log_z = log sum_j e^x_j, loss = log_z - x_label,
 * gradient_j = (1 + 2 z log_z) e^(x_j - log_z) - (1 - e) [j = label] - e / vocabulary,
 * with label smoothing e and z-loss z (../fused_loss.py).
 */
#ifndef NUMBER /* the file includes itself for each type of numbers */
#include "bf16.h"
#include "as_bf16.h"
#include "cross_entropy.c"
#include "as_fp32.h"
#include "cross_entropy.c"
#else

static float NAMED(largest_of)(const NUMBER *row, int64_t count) {
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < count; i++) {
        float v = TO_FLOAT(row[i]);
        largest = v > largest ? v : largest;
    }
    return largest;
}

static float NAMED(sum_of_exponentials)(const NUMBER *row, int64_t count, float largest) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++)
        sum += EXPONENTIAL(TO_FLOAT(row[i]) - largest);
    return sum;
}

void NAMED(cross_entropy)(NUMBER *logits, const int64_t *labels, float *losses, float *log_zs, int64_t rows,
                          int64_t count, int64_t with_gradient, float smoothing, float z_loss) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        NUMBER *row = logits + r * count;
        float largest = NAMED(largest_of)(row, count), sum = NAMED(sum_of_exponentials)(row, count, largest);
        float log_z = largest + logf(sum), at_label = TO_FLOAT(row[labels[r]]);
        losses[r] = log_z - at_label;
        log_zs[r] = log_z;
        if (!with_gradient)
            continue;
        float scale = (1.0f + 2.0f * z_loss * log_z) / sum, shift = smoothing / (float)count;
        float own = EXPONENTIAL(at_label - largest) * scale - shift - (1.0f - smoothing);
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            row[i] = FROM_FLOAT(EXPONENTIAL(TO_FLOAT(row[i]) - largest) * scale - shift);
        row[labels[r]] = FROM_FLOAT(own);
    }
}
#endif
