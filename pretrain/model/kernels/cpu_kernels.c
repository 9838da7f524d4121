/* Elementwise bf16 functions for which torch has no fast CPU kernel. Compiled and loaded by cpu_kernels.py.
 *
 * gelu_tanh(x) = x * sigmoid(z(x)),  z(x) = LINEAR x + CUBIC x^3,  as 1 + tanh(u) = 2 sigmoid(2u)
 * derivative   = s + x s (1 - s) z'(x),  s = sigmoid(z(x)),  z'(x) = LINEAR + 3 CUBIC x^2
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LINEAR 1.5957691216057308f /* 2 sqrt(2 / pi) */
#define CUBIC (LINEAR * 0.044715f)

static inline float to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bf16(float value) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* 1 / (1 + e^-z): 2^(whole + part), a polynomial for 2^part with part in [-1/2, 1/2]; error at most 3e-6. */
static inline float sigmoid(float z) {
    float t = z * -1.44269504f;
    t = t < -126.0f ? -126.0f : t; /* not fmaxf: its NaN rules prevent vectorization */
    t = t > 126.0f ? 126.0f : t;
    float whole = rintf(t), part = t - whole;
    float power = 1.3333558e-3f;
    power = power * part + 9.6181291e-3f;
    power = power * part + 5.5504109e-2f;
    power = power * part + 2.4022651e-1f;
    power = power * part + 6.9314718e-1f;
    power = power * part + 1.0f;
    int32_t exponent = ((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &exponent, 4);
    return 1.0f / (1.0f + power * scale);
}

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
