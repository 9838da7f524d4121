/* Activation functions, alone or multiplied by another input (gated), with their backward passes.
 *
 * gelu_tanh(x) = x sigmoid(z(x)),  z(x) = LINEAR x + CUBIC x^3,  as 1 + tanh(u) = 2 sigmoid(2u)
 * gelu(x)      = x (1 + erf(x / sqrt(2))) / 2
 * silu(x)      = x sigmoid(x)
 * All are x s(x), with the derivative s + x s'. In fp32 there are gelu_tanh and silu: gelu is as fast in torch.
 */
#ifdef __GNUC__
/* gcc then divides by an approximate reciprocal and a Newton step. NaN still propagates: the results are products. */
#pragma GCC optimize("finite-math-only")
#endif
#include "bf16.h"

#define LINEAR 1.5957691216057308f /* 2 sqrt(2 / pi) */
#define CUBIC (LINEAR * 0.044715f)

static inline float sigmoid_fp32(float z) { return 1.0f / (1.0f + exponential_fp32(-z)); }

#define FACTORS(TYPE, SIGMOID)                                                                          \
    static inline float gelu_tanh##TYPE##_factor(float x, float *slope) {                               \
        float square = x * x, s = SIGMOID(x * (LINEAR + CUBIC * square));                               \
        *slope = s * (1.0f - s) * (LINEAR + 3.0f * CUBIC * square);                                     \
        return s;                                                                                       \
    }                                                                                                   \
    static inline float silu##TYPE##_factor(float x, float *slope) {                                    \
        float s = SIGMOID(x);                                                                           \
        *slope = s * (1.0f - s);                                                                        \
        return s;                                                                                       \
    }

FACTORS(, sigmoid)
FACTORS(_fp32, sigmoid_fp32)

/* The normal distribution function; erf is formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions. */
static inline float gelu_factor(float x, float *slope) {
    float t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * (x < 0.0f ? -x : x));
    float density = exponential(-0.5f * x * x);
    float tail = 0.5f * density * t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f +
                 t * (-1.453152027f + t * 1.061405429f))));
    *slope = 0.39894228f * density;
    return x < 0.0f ? tail : 1.0f - tail;
}

/* A loop over blocks of elements, each block prefetched: without it, about half of the time is spent waiting. */
#define FOR_EACH_BLOCK(start, stop)                                                                     \
    _Pragma("omp parallel for schedule(static)")                                                        \
    for (int64_t start = 0; start < count; start += BLOCK)                                              \
        for (int64_t stop = start + BLOCK < count ? start + BLOCK : count, once = 1; once; once = 0)

#define ACTIVATION(NAME, NUMBER, TO_FLOAT, FROM_FLOAT)                                                  \
    void NAME(const NUMBER *restrict x, NUMBER *restrict out, int64_t count) {                          \
        FOR_EACH_BLOCK(start, stop) {                                                                   \
            prefetch(x + start), prefetch(out + start);                                                 \
            _Pragma("omp simd")                                                                         \
            for (int64_t i = start; i < stop; i++) {                                                    \
                float v = TO_FLOAT(x[i]), slope;                                                        \
                out[i] = FROM_FLOAT(v * NAME##_factor(v, &slope));                                      \
            }                                                                                           \
        }                                                                                               \
    }                                                                                                   \
                                                                                                        \
    /* grad becomes the gradient of x */                                                                \
    void NAME##_backward(NUMBER *restrict grad, const NUMBER *restrict x,                               \
                         NUMBER *restrict activated, int64_t count) {                                   \
        FOR_EACH_BLOCK(start, stop) {                                                                   \
            prefetch(grad + start), prefetch(x + start), prefetch(activated + start);                   \
            _Pragma("omp simd")                                                                         \
            for (int64_t i = start; i < stop; i++) {                                                    \
                float v = TO_FLOAT(x[i]), slope, s = NAME##_factor(v, &slope);                          \
                activated[i] = FROM_FLOAT(v * s);                                                       \
                grad[i] = FROM_FLOAT(TO_FLOAT(grad[i]) * (s + v * slope));                              \
            }                                                                                           \
        }                                                                                               \
    }                                                                                                   \
                                                                                                        \
    void NAME##_gated(const NUMBER *restrict gate, const NUMBER *restrict up,                           \
                      NUMBER *restrict out, int64_t count) {                                            \
        FOR_EACH_BLOCK(start, stop) {                                                                   \
            prefetch(gate + start), prefetch(up + start), prefetch(out + start);                        \
            _Pragma("omp simd")                                                                         \
            for (int64_t i = start; i < stop; i++) {                                                    \
                float v = TO_FLOAT(gate[i]), slope;                                                     \
                out[i] = FROM_FLOAT(v * NAME##_factor(v, &slope) * TO_FLOAT(up[i]));                    \
            }                                                                                           \
        }                                                                                               \
    }                                                                                                   \
                                                                                                        \
    /* grad becomes the gradient of up */                                                               \
    void NAME##_gated_backward(NUMBER *restrict grad, const NUMBER *restrict gate,                      \
                               const NUMBER *restrict up, NUMBER *restrict inner,                       \
                               NUMBER *restrict dgate, int64_t count) {                                 \
        FOR_EACH_BLOCK(start, stop) {                                                                   \
            prefetch(grad + start), prefetch(gate + start), prefetch(up + start);                       \
            prefetch(inner + start), prefetch(dgate + start);                                           \
            _Pragma("omp simd")                                                                         \
            for (int64_t i = start; i < stop; i++) {                                                    \
                float v = TO_FLOAT(gate[i]), u = TO_FLOAT(up[i]), g = TO_FLOAT(grad[i]), slope;         \
                float s = NAME##_factor(v, &slope), activated = v * s;                                  \
                inner[i] = FROM_FLOAT(activated * u);                                                   \
                dgate[i] = FROM_FLOAT(g * u * (s + v * slope));                                         \
                grad[i] = FROM_FLOAT(g * activated);                                                    \
            }                                                                                           \
        }                                                                                               \
    }

ACTIVATION(gelu_tanh, uint16_t, to_float, to_bf16)
ACTIVATION(gelu, uint16_t, to_float, to_bf16)
ACTIVATION(silu, uint16_t, to_float, to_bf16)
ACTIVATION(gelu_tanh_fp32, float, , )
ACTIVATION(silu_fp32, float, , )
