/* Cross-entropy of bf16 logits, and its gradient in their place.
 *
 * For each row x of logits: log_z = log sum_j e^x_j, loss = log_z - x_label,
 * gradient_j = (1 + 2 z log_z) e^(x_j - log_z) - (1 - e) [j = label] - e / vocabulary,
 * with label smoothing e and z-loss z (../fused_loss.py).
 */
#include "bf16.h"

static float largest_of(const uint16_t *row, int64_t count) {
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < count; i++) {
        float v = to_float(row[i]);
        largest = v > largest ? v : largest;
    }
    return largest;
}

static float sum_of_exponentials(const uint16_t *row, int64_t count, float largest) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++)
        sum += exponential(to_float(row[i]) - largest);
    return sum;
}

void cross_entropy(uint16_t *logits, const int64_t *labels, float *losses, float *log_zs, int64_t rows, int64_t count,
                   int64_t with_gradient, float smoothing, float z_loss) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        uint16_t *row = logits + r * count;
        float largest = largest_of(row, count), sum = sum_of_exponentials(row, count, largest);
        float log_z = largest + logf(sum), at_label = to_float(row[labels[r]]);
        losses[r] = log_z - at_label;
        log_zs[r] = log_z;
        if (!with_gradient)
            continue;
        float scale = (1.0f + 2.0f * z_loss * log_z) / sum, shift = smoothing / (float)count;
        float own = exponential(at_label - largest) * scale - shift - (1.0f - smoothing);
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            row[i] = to_bf16(exponential(to_float(row[i]) - largest) * scale - shift);
        row[labels[r]] = to_bf16(own);
    }
}
