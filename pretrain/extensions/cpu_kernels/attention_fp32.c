/* Causal attention in fp32: some rows of scores at a time, complete ones, so that nothing is rescaled.
 *
 * P = softmax(scale Q K^T), O = P V;  with D = rowsum(dO * O): dS = scale P (dO V^T - D), dV = P^T dO, dQ = dS K,
 * dK = dS^T Q. The backward pass computes P again from the logarithms of the sums. A row's results do not depend on
 * the number of threads: a thread computes all query heads of a key/value head.
 */
#include <stdlib.h>
#include "panels.h"

#define QUERIES 48 /* at most */

typedef struct { /* steps: elements from one position to the next */
    int64_t length, heads, size, qkv_step, out_step, pitch, queries;
    float scale;
} Problem;

/* The scores of `rows` queries from `first` on, for all keys that the last of them sees, rounded to panels. */
static void scores_of(const Problem *p, const float *q, const float *k_panels, int64_t first, int64_t rows, float *s) {
    for (int64_t key = 0; key < first + rows; key += PANEL)
        panel_product(rows, (Strided){q + first * p->qkv_step, p->qkv_step, 1}, k_panels + key * p->size, PANEL,
                      p->size, s + key, p->pitch, NULL, 0);
}

/* Hide the keys from `seen` on; return the end of the loops over the row, complete vectors. Its rest becomes 0. */
static inline int64_t hide(float *row, int64_t seen, int64_t keys) {
    int64_t end = (seen + LANES - 1) / LANES * LANES;
    for (int64_t j = seen; j < end; j++)
        row[j] = -1e30f;
    if (end < keys)
        memset(row + end, 0, (size_t)(keys - end) * sizeof(float));
    return end;
}

/* c = a b, or c += a b, for the columns of a head */
static void head_product(const Problem *p, int64_t rows, Strided a, const float *b, int64_t b_row, int64_t depth,
                         float *c, int64_t c_row, int adds) {
    for (int64_t e = 0; e < p->size; e += PANEL)
        panel_product(rows, a, b + e, b_row, depth, c + e, c_row, adds ? c + e : NULL, c_row);
}

/* panels [keys / PANEL, size, PANEL] of the transposed keys or values of a head, with zeros after the last position */
static void transpose_head(const Problem *p, const float *x, float *panels) {
    for (int64_t key = 0; key < p->length; key += PANEL) {
        const float *from = x + key * p->qkv_step;
        float *to = panels + key * p->size;
        if (key + PANEL <= p->length)
            for (int64_t e = 0; e < p->size; e += SQUARE)
                transpose_square(from + e, p->qkv_step, to + e * PANEL);
        else
            for (int64_t e = 0; e < p->size; e++)
                for (int64_t j = 0; j < PANEL; j++)
                    to[e * PANEL + j] = key + j < p->length ? from[j * p->qkv_step + e] : 0.0f;
    }
}

static void forward_head(const Problem *p, const float *q, const float *k_panels, const float *v, float *out,
                         float *logs, float *s) {
    for (int64_t first = 0; first < p->length; first += p->queries) {
        int64_t rows = smaller(p->queries, p->length - first);
        float factors[QUERIES];
        scores_of(p, q, k_panels, first, rows, s);
        for (int64_t i = 0; i < rows; i++) {
            float *restrict row = s + i * p->pitch, largest = -INFINITY, sum = 0.0f;
            int64_t end = hide(row, first + i + 1, first + rows);
#pragma omp simd reduction(max : largest)
            for (int64_t j = 0; j < end; j++)
                largest = row[j] > largest ? row[j] : largest;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < end; j++) {
                row[j] = exponential_fp32(p->scale * (row[j] - largest));
                sum += row[j];
            }
            factors[i] = 1.0f / sum;
            logs[first + i] = p->scale * largest + logf(sum);
        }
        float *to = out + first * p->out_step;
        head_product(p, rows, (Strided){s, p->pitch, 1}, v, p->qkv_step, first + rows, to, p->out_step, 0);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t e = 0; e < p->size; e++)
                to[i * p->out_step + e] *= factors[i];
    }
}

typedef struct {
    const float *q, *k, *k_panels, *v_panels, *out, *grad, *logs;
    float *dq, *dk, *dv, *s, *ds;
} Backward;

static void backward_head(const Problem *p, Backward h) {
    for (int64_t first = 0; first < p->length; first += p->queries) {
        int64_t rows = smaller(p->queries, p->length - first), keys = first + rows;
        const float *grad = h.grad + first * p->out_step;
        scores_of(p, h.q, h.k_panels, first, rows, h.s);
        for (int64_t key = 0; key < keys; key += PANEL)
            panel_product(rows, (Strided){grad, p->out_step, 1}, h.v_panels + key * p->size, PANEL, p->size,
                          h.ds + key, p->pitch, NULL, 0);
        for (int64_t i = 0; i < rows; i++) {
            float *restrict s = h.s + i * p->pitch, *restrict ds = h.ds + i * p->pitch, mean = 0.0f;
            float log_sum = h.logs[first + i];
            const float *own = h.out + (first + i) * p->out_step;
            int64_t end = hide(s, first + i + 1, keys);
#pragma omp simd reduction(+ : mean)
            for (int64_t e = 0; e < p->size; e++)
                mean += own[e] * grad[i * p->out_step + e];
#pragma omp simd
            for (int64_t j = 0; j < end; j++) {
                s[j] = exponential_fp32(p->scale * s[j] - log_sum);
                ds[j] = p->scale * s[j] * (ds[j] - mean);
            }
            if (end < keys)
                memset(ds + end, 0, (size_t)(keys - end) * sizeof(float));
        }
        int64_t step = p->qkv_step;
        head_product(p, rows, (Strided){h.ds, p->pitch, 1}, h.k, step, keys, h.dq + first * step, step, 0);
        head_product(p, keys, (Strided){h.s, 1, p->pitch}, grad, p->out_step, rows, h.dv, step, 1);
        head_product(p, keys, (Strided){h.ds, 1, p->pitch}, h.q + first * step, step, rows, h.dk, step, 1);
    }
}

static Problem problem(int64_t length, int64_t heads, int64_t kv_heads, int64_t size, float scale) {
    int64_t pitch = (length + PANEL - 1) / PANEL * PANEL + LANES; /* not a power of two: rows in different sets */
    int64_t queries = length < 2 * QUERIES ? QUERIES / 2 : QUERIES; /* of short samples, more scores are not computed */
    return (Problem){length, heads, size, (heads + 2 * kv_heads) * size, heads * size, pitch, queries, scale};
}

static float *new_memory(const Problem *p, int64_t panels, int64_t scores) {
    return aligned_alloc(64, (size_t)(p->pitch * (panels * p->size + scores * QUERIES)) * sizeof(float) / 64 * 64 + 64);
}

/* qkv [batch, length, heads + 2 kv_heads, size], out [batch, length, heads, size], logs [batch, heads, length] of the
 * softmax sums. size is a multiple of SQUARE. */
void attention_fp32(const float *qkv, float *out, float *logs, int64_t batch, int64_t length, int64_t heads,
                    int64_t kv_heads, int64_t size, float scale) {
    Problem p = problem(length, heads, kv_heads, size, scale);
#pragma omp parallel
    {
        float *panels = new_memory(&p, 1, 1), *s = panels + p.pitch * size;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < batch * kv_heads; i++) {
            int64_t sample = i / kv_heads, kv_head = i % kv_heads, group = heads / kv_heads;
            const float *q = qkv + sample * length * p.qkv_step, *k = q + (heads + kv_head) * size;
            transpose_head(&p, k, panels);
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
                forward_head(&p, q + head * size, panels, k + kv_heads * size,
                             out + sample * length * p.out_step + head * size,
                             logs + (sample * heads + head) * length, s);
        }
        free(panels);
    }
}

/* dqkv has the layout of qkv */
void attention_fp32_backward(const float *qkv, const float *out, const float *grad, const float *logs, float *dqkv,
                             int64_t batch, int64_t length, int64_t heads, int64_t kv_heads, int64_t size,
                             float scale) {
    Problem p = problem(length, heads, kv_heads, size, scale);
#pragma omp parallel
    {
        float *memory = new_memory(&p, 2, 2);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < batch * kv_heads; i++) {
            int64_t sample = i / kv_heads, kv_head = i % kv_heads, group = heads / kv_heads;
            int64_t at = sample * length * p.qkv_step;
            int64_t keys = at + (heads + kv_head) * size, values = keys + kv_heads * size;
            float *v_panels = memory + p.pitch * size, *s = v_panels + p.pitch * size;
            transpose_head(&p, qkv + keys, memory);
            transpose_head(&p, qkv + values, v_panels);
            for (int64_t j = 0; j < length; j++) {
                memset(dqkv + keys + j * p.qkv_step, 0, (size_t)size * sizeof(float));
                memset(dqkv + values + j * p.qkv_step, 0, (size_t)size * sizeof(float));
            }
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
                int64_t own = sample * length * p.out_step + head * size;
                backward_head(&p, (Backward){qkv + at + head * size, qkv + keys, memory, v_panels, out + own,
                                             grad + own, logs + (sample * heads + head) * length,
                                             dqkv + at + head * size, dqkv + keys, dqkv + values, s,
                                             s + p.pitch * QUERIES});
            }
        }
        free(memory);
    }
}
