/* Activation functions.
 *
 * gelu_tanh(x) = x * sigmoid(z(x)),  z(x) = LINEAR x + CUBIC x^3,  as 1 + tanh(u) = 2 sigmoid(2u)
 * derivative   = s + x s (1 - s) z'(x),  s = sigmoid(z(x)),  z'(x) = LINEAR + 3 CUBIC x^2
 */
#include "bf16.h"

#define LINEAR 1.5957691216057308f /* 2 sqrt(2 / pi) */
#define CUBIC (LINEAR * 0.044715f)

void gelu_tanh(const uint16_t *restrict x, uint16_t *restrict out, int64_t count) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float v = to_float(x[i]);
        out[i] = to_bf16(v * sigmoid(v * (LINEAR + CUBIC * v * v)));
    }
}

void gelu_tanh_backward(const uint16_t *restrict grad, const uint16_t *restrict x, uint16_t *restrict out,
                        int64_t count) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float v = to_float(x[i]), square = v * v;
        float s = sigmoid(v * (LINEAR + CUBIC * square));
        out[i] = to_bf16(to_float(grad[i]) * (s + v * s * (1.0f - s) * (LINEAR + 3.0f * CUBIC * square)));
    }
}
