/* Numbers in bf16, functions that the compiler vectorizes, and the smaller and larger of two sizes. */
#ifndef BF16_H
#define BF16_H
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

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

/* x 2^whole, for a whole number from -127 to 126 */
static inline float times_power_of_2(float x, float whole) {
    int32_t exponent = ((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &exponent, 4);
    return x * scale;
}

/* e^x = 2^(whole + part), a polynomial for 2^part with part in [-1/2, 1/2]: relative error at most 3e-6; 0 below and
 * 2^126 above the range of t. */
static inline float exponential(float x) {
    float t = x * 1.44269504f;
    t = t < -127.0f ? -127.0f : t; /* not fmaxf: its NaN rules prevent vectorization */
    t = t > 126.0f ? 126.0f : t;
    float whole = rintf(t), part = t - whole;
    float power = 9.666368365e-3f;
    power = power * part + 5.592197552e-2f;
    power = power * part + 2.402234972e-1f;
    power = power * part + 6.931210160e-1f;
    power = power * part + 1.0f;
    return times_power_of_2(power, whole);
}

/* e^x with a relative error below 1e-6, for results in fp32. */
static inline float exponential_fp32(float x) {
    float t = x * 1.44269504f;
    t = t < -127.0f ? -127.0f : t;
    t = t > 126.0f ? 126.0f : t;
    float whole = rintf(t), part = fmaf(x, 1.44269504f, -whole); /* t is rounded */
    part = fmaf(x, 1.92596299e-8f, part);                        /* the rest of log2(e) */
    part = part < -0.5f ? -0.5f : part;
    part = part > 0.5f ? 0.5f : part;
    float power = 1.5461448e-4f;
    power = power * part + 1.3390867e-3f;
    power = power * part + 9.6180569e-3f;
    power = power * part + 5.5503570e-2f;
    power = power * part + 2.4022651e-1f;
    power = power * part + 6.9314718e-1f;
    power = power * part + 1.0f;
    return times_power_of_2(power, whole);
}

static inline float sigmoid(float z) { return 1.0f / (1.0f + exponential(-z)); }

#define BLOCK 512 /* elements of 2 bytes: a prefetch may end before the end of a page, where the processor's stops */

static inline void prefetch_line(const void *address) { /* it need not exist */
#ifdef __GNUC__
    __builtin_prefetch(address, 0, 2);
#else
    (void)address;
#endif
}

static inline void prefetch(const void *block) { /* the block after the next one, of elements of 2 bytes */
    for (int line = 0; line < BLOCK; line += 32)
        prefetch_line((const uint16_t *)block + 2 * BLOCK + line);
}

#endif
