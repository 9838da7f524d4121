/* Causal attention in bf16: what its forward and its backward pass share.
 *
 * Forward (FlashAttention, arXiv 2205.14135): S = scale Q K^T,  P = exp(S - max),  O = P V / sum.
 * Saved for the backward pass: L = log2 of the softmax sums, with the maximum.
 * Backward, with D = rowsum(dO * O), transposed, so that no block has to be transposed again:
 *   P^T = 2^(S^T - L),  dS^T = P^T * (V dO^T - D) * scale,  dV = P^T dO,  dK = dS^T Q,  dQ^T = K^T dS^T.
 * Exponents are in units of log2(e). Query t sees the keys first[t] .. t, where first never decreases: this describes
 * windows and documents. Blocks of 32 x 32 scores of which nothing is visible are skipped. A thread computes all query
 * heads of a key/value head of a sample, so that the results do not depend on the number of threads.
 */
#ifndef ATTENTION_H
#define ATTENTION_H
#include "tiles.h"

#ifdef HAS_BF16_PRODUCTS
#include <stdlib.h>

typedef struct {
    int64_t batch, length, heads, kv_heads, size, rotary;
    int64_t q_step, k_step, v_step; /* elements from a position to the next one */
    const uint16_t *cos, *sin;      /* [length, rotary / 2], or with table_step one for each sample */
    int64_t table_step;
    const int32_t *first;           /* [length], or with first_step one for each sample */
    int64_t first_step;
    const float *slopes;            /* ALiBi: [heads], or NULL */
    float scale, softcap;           /* softcap 0: none */
    int amx;
} Attention;

#define LOG2E 1.44269504f
enum { AHEAD = 16 };

static inline int64_t rounded(int64_t x) { return (x + TILE - 1) / TILE * TILE; }

static inline void *take(char **memory, int64_t bytes) { /* a part of the memory, aligned to cache lines */
    void *part = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return part;
}

/* Rotate one head of one position, by -angle with sign = -1. */
static inline void rotate(const Attention *a, int64_t sample, int64_t position, float sign, const float *restrict x,
                          float *restrict out) {
    int64_t half = a->rotary / 2;
    const uint16_t *restrict cos = a->cos + sample * a->table_step + position * half;
    const uint16_t *restrict sin = a->sin + sample * a->table_step + position * half;
    for (int64_t i = 0; i < half; i++) {
        float c = to_float(cos[i]), s = sign * to_float(sin[i]);
        out[i] = x[i] * c - x[i + half] * s;
        out[i + half] = x[i + half] * c + x[i] * s;
    }
    for (int64_t i = 2 * half; i < a->size; i++) out[i] = x[i];
}

/* Fetch a row that is used AHEAD rows later, because the processor does not recognize such steps; it need not exist. */
static inline void prefetch_row(const uint16_t *row, int64_t size) {
    for (int64_t i = 0; i < size; i += 32) __builtin_prefetch(row + i);
}

/* Copy positions start .. start + count of a head into rows of `width`, rotated; 0 after the last position. */
static inline void load_rows(const Attention *a, const uint16_t *x, int64_t step, int64_t sample, int64_t start,
                             int64_t count, int64_t width, int rotated_rows, uint16_t *out) {
    float row[width], turned[width];
    for (int64_t t = start; t < start + count; t++, out += width) {
        int64_t filled = t < a->length ? a->size : 0;
        const uint16_t *restrict source = x + t * step;
        prefetch_row(source + AHEAD * step, a->size);
        if (rotated_rows && a->rotary && filled) {
            for (int64_t i = 0; i < filled; i++) row[i] = to_float(source[i]);
            rotate(a, sample, t, 1.0f, row, turned);
            for (int64_t i = 0; i < filled; i++) out[i] = to_bf16(turned[i]);
        } else {
            memcpy(out, source, (size_t)filled * 2);
        }
        memset(out + filled, 0, (size_t)(width - filled) * 2);
    }
}

/* The last parameters of the exported functions, and the structure that they fill. */
#define SETTINGS                                                                                                      \
    int64_t batch, int64_t length, int64_t heads, int64_t kv_heads, int64_t size, int64_t q_step, int64_t k_step,     \
        int64_t v_step, const uint16_t *cos, const uint16_t *sin, int64_t rotary, int64_t table_step,                 \
        const int32_t *first, int64_t first_step, const float *slopes, float scale, float softcap, int64_t amx
#define PROBLEM                                                                                                       \
    {batch, length, heads, kv_heads, size, rotary, q_step, k_step, v_step, cos, sin, table_step, first, first_step,   \
     slopes, scale, softcap, (int)amx}

#endif
#endif
