/* Causal attention in bf16: backward pass, 128 queries and 128 keys at a time. */
#include "attention.h"

#ifdef HAS_BF16_PRODUCTS

enum { QUERIES = 128 };

typedef struct {
    int64_t length, width, pitch; /* of k_columns */
    uint16_t *k_rows, *k_columns, *v_rows;                            /* of the key/value head */
    uint16_t *q_rows, *q_pairs, *q_column_pairs, *g_rows, *g_pairs, *g_column_pairs; /* of QUERIES queries */
    uint16_t *p, *ds, *ds_pairs;                                      /* [keys, QUERIES] */
    float *logs, *deltas, *dq_columns, *dk, *dv;
    int32_t *first;
} Backward;

/* P^T, dS^T and pairs of rows of dS^T for 32 keys and 32 queries, from S^T and V dO^T. */
static void score_gradients(const Attention *a, int64_t head, int64_t key, int64_t query,
                            const int32_t *first, const float *s, const float *dp, uint16_t *p, uint16_t *ds,
                            uint16_t *ds_pairs, const float *logs, const float *deltas) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i interleaved = _mm512_or_si512(
        lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16)), 16));
    int special = a->softcap || a->slopes, edge = key + TILE > query || first[TILE - 1] > key;
    const __m512 unit = _mm512_set1_ps(special ? 1.0f : a->scale * LOG2E), scale = _mm512_set1_ps(a->scale);
    for (int i = 0; i < TILE; i += 2) {
        __m512 ps[2][2], dss[2][2];
        for (int row = 0; row < 2; row++)
            for (int half = 0; half < 2; half++) {
                int at = (i + row) * TILE + 16 * half;
                __m512 x = _mm512_loadu_ps(s + at), slope = scale;
                if (special) {
                    float capped[16], factors[16];
                    for (int j = 0; j < 16; j++) {
                        float u = s[at + j] * a->scale;
                        float tanh = a->softcap ? 2.0f * sigmoid(2.0f * u / a->softcap) - 1.0f : 0.0f;
                        u = a->softcap ? a->softcap * tanh : u;
                        float distance = (float)(key + i + row - (query + 16 * half + j));
                        capped[j] = LOG2E * (u + (a->slopes ? a->slopes[head] * distance : 0.0f));
                        factors[j] = a->scale * (1.0f - tanh * tanh);
                    }
                    x = _mm512_loadu_ps(capped), slope = _mm512_loadu_ps(factors);
                }
                __m512 power = exp2_16(_mm512_fmsub_ps(x, unit, _mm512_loadu_ps(logs + 16 * half)));
                __m512 d = _mm512_sub_ps(_mm512_loadu_ps(dp + at), _mm512_loadu_ps(deltas + 16 * half));
                d = _mm512_mul_ps(_mm512_mul_ps(d, slope), power);
                if (edge) {
                    __m512i at_key = _mm512_set1_epi32((int)key + i + row);
                    __m512i at_query = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)query + 16 * half));
                    __mmask16 visible = _mm512_cmple_epi32_mask(at_key, at_query) &
                                        _mm512_cmpge_epi32_mask(at_key, _mm512_loadu_si512(first + 16 * half));
                    power = _mm512_maskz_mov_ps(visible, power), d = _mm512_maskz_mov_ps(visible, d);
                }
                ps[row][half] = power, dss[row][half] = d;
            }
        for (int row = 0; row < 2; row++) {
            int64_t at = (i + row) * QUERIES;
            _mm512_storeu_si512(p + at, (__m512i)_mm512_cvtne2ps_pbh(ps[row][1], ps[row][0]));
            _mm512_storeu_si512(ds + at, (__m512i)_mm512_cvtne2ps_pbh(dss[row][1], dss[row][0]));
        }
        for (int half = 0; half < 2; half++)
            _mm512_storeu_si512(ds_pairs + i * QUERIES + 32 * half,
                                _mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh(dss[1][half],
                                                                                                   dss[0][half])));
    }
}

/* All blocks of `queries` queries from `start` on, and of keys from .. to, which are at most QUERIES keys. */
static void backward_block(const Attention *a, const Backward *b, int64_t head, int64_t start, int64_t queries,
                           int64_t from, int64_t to) {
    int64_t width = b->width;
    float s[TILE * TILE], dp[TILE * TILE];
    for (int64_t query = 0; query < queries; query += TILE) {
        int64_t low = larger(from, b->first[query] / TILE * TILE), high = smaller(to, start + query + TILE);
        for (int64_t key = low; key < high; key += TILE) {
            int64_t at = (key - from) * QUERIES;
            const uint16_t *q_columns = b->q_column_pairs + query * width;
            const uint16_t *g_columns = b->g_column_pairs + query * width;
            product(a->amx, b->k_rows + key * width, width, q_columns, TILE, width, s, TILE, 0);
            product(a->amx, b->v_rows + key * width, width, g_columns, TILE, width, dp, TILE, 0);
            score_gradients(a, head, key, start + query, b->first + query, s, dp, b->p + at + query,
                            b->ds + at + query, b->ds_pairs + at + 2 * query, b->logs + query, b->deltas + query);
        }
        for (int64_t e = 0; e < width && low < high; e += TILE)
            product(a->amx, b->k_columns + e * b->pitch + low, b->pitch,
                    b->ds_pairs + (low - from) * QUERIES + 2 * query, QUERIES, high - low, b->dq_columns + e * QUERIES + query, QUERIES, 1);
    }
    for (int64_t key = from; key < to; key += TILE) {
        int64_t begin = larger(0, key - start), end = begin, at = (key - from) * QUERIES + begin;
        while (end < queries && b->first[end] / TILE * TILE <= key) end += TILE;
        for (int64_t e = 0; e < width && begin < end; e += TILE) {
            product(a->amx, b->p + at, QUERIES, b->g_pairs + begin * width + 2 * e, width, end - begin,
                    b->dv + key * width + e, width, 1);
            product(a->amx, b->ds + at, QUERIES, b->q_pairs + begin * width + 2 * e, width, end - begin,
                    b->dk + key * width + e, width, 1);
        }
    }
}

/* Pack QUERIES queries and their output gradients, and compute D. */
static void load_queries(const Attention *a, Backward *b, int64_t sample, int64_t start, int64_t count,
                         const uint16_t *q, const uint16_t *out, const uint16_t *grad, const float *logs) {
    int64_t step = a->heads * a->size, width = b->width;
    load_rows(a, q, a->q_step, sample, start, count, width, 1, b->q_rows);
    load_rows(a, grad, step, sample, start, count, width, 0, b->g_rows);
    pair_rows(b->q_rows, count, width, b->q_pairs);
    pair_rows(b->g_rows, count, width, b->g_pairs);
    for (int64_t i = 0; i < count * width; i += TILE * width) {
        pair_columns(b->q_rows + i, TILE, width, b->q_column_pairs + i);
        pair_columns(b->g_rows + i, TILE, width, b->g_column_pairs + i);
    }
    const int32_t *first = a->first + sample * a->first_step;
    for (int64_t i = 0; i < count; i++) {
        int64_t t = smaller(start + i, a->length - 1);
        const uint16_t *g = b->g_rows + i * width, *o = out + t * step;
        float sum = 0.0f;
        prefetch_row(o + AHEAD * step, a->size);
        for (int64_t e = 0; e < a->size; e++) sum += to_float(g[e]) * to_float(o[e]);
        b->deltas[i] = start + i < a->length ? sum : 0.0f;
        b->logs[i] = start + i < a->length ? logs[t] : 0.0f;
        b->first[i] = first[t];
    }
}

static void store_row(const Attention *a, const float *x, int64_t sample, int64_t position, int rotated_row,
                      uint16_t *restrict out) {
    float turned[a->size];
    if (rotated_row && a->rotary) {
        rotate(a, sample, position, -1.0f, x, turned);
        x = turned;
    }
    for (int64_t i = 0; i < a->size; i++) out[i] = to_bf16(x[i]);
}

static void store_query_gradients(const Attention *a, const Backward *b, int64_t sample, int64_t start, uint16_t *dq) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i offsets = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(QUERIES));
    float row[b->width];
    for (int64_t t = start; t < smaller(start + QUERIES, a->length); t++) {
        for (int64_t e = 0; e < b->width; e += 16)
            _mm512_storeu_ps(row + e, _mm512_i32gather_ps(offsets, b->dq_columns + e * QUERIES + t - start, 4));
        prefetch_row(dq + (t + AHEAD) * a->q_step, a->size);
        store_row(a, row, sample, t, 1, dq + t * a->q_step);
    }
}

static Backward allocate_backward(int64_t length, int64_t width, char **memory) {
    Backward b = {.length = length, .width = width, .pitch = (length / TILE | 1) * TILE};
    int64_t keys = (length + TILE) * width * 2, queries = QUERIES * width * 2, scores = QUERIES * QUERIES * 2;
    uint16_t **of_keys[] = {&b.k_rows, &b.k_columns, &b.v_rows}, **of_scores[] = {&b.p, &b.ds, &b.ds_pairs};
    uint16_t **of_queries[] = {&b.q_rows, &b.q_pairs, &b.q_column_pairs, &b.g_rows, &b.g_pairs, &b.g_column_pairs};
    for (int i = 0; i < 3; i++) *of_keys[i] = take(memory, keys), *of_scores[i] = take(memory, scores);
    for (int i = 0; i < 6; i++) *of_queries[i] = take(memory, queries);
    b.logs = take(memory, QUERIES * 4), b.deltas = take(memory, QUERIES * 4), b.first = take(memory, QUERIES * 4);
    b.dq_columns = take(memory, QUERIES * width * 4), b.dk = take(memory, keys * 2), b.dv = take(memory, keys * 2);
    return b;
}

typedef struct { /* tensors of the backward pass: [batch, length, heads, size], gradients with the same steps */
    const uint16_t *q, *k, *v, *out, *grad;
    const float *logs;
    uint16_t *dq, *dk, *dv;
} Tensors;

static void backward_heads(const Attention *a, int64_t sample, int64_t kv_head, const Tensors *x, char *memory) {
    int64_t length = rounded(a->length), width = rounded(a->size), group = a->heads / a->kv_heads;
    Backward b = allocate_backward(length, width, &memory);
    int64_t at_k = sample * a->length * a->k_step + kv_head * a->size;
    int64_t at_v = sample * a->length * a->v_step + kv_head * a->size;
    load_rows(a, x->v + at_v, a->v_step, sample, 0, length, width, 0, b.v_rows);
    load_rows(a, x->k + at_k, a->k_step, sample, 0, length, width, 1, b.k_rows);
    for (int64_t key = 0; key < length; key += TILE)
        transpose_rows(b.k_rows + key * width, width, b.k_columns + key, b.pitch);
    memset(b.dk, 0, length * width * 4);
    memset(b.dv, 0, length * width * 4);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        int64_t at_q = sample * a->length * a->q_step + head * a->size;
        int64_t at_out = (sample * a->length * a->heads + head) * a->size;
        for (int64_t start = 0; start < a->length; start += QUERIES) {
            int64_t count = smaller(QUERIES, length - start);
            load_queries(a, &b, sample, start, count, x->q + at_q, x->out + at_out, x->grad + at_out,
                         x->logs + (sample * a->heads + head) * a->length);
            memset(b.dq_columns, 0, QUERIES * width * 4);
            for (int64_t from = b.first[0] / TILE * TILE; from < start + count; from += QUERIES)
                backward_block(a, &b, head, start, count, from, smaller(from + QUERIES, start + count));
            store_query_gradients(a, &b, sample, start, x->dq + at_q);
        }
    }
    for (int64_t t = 0; t < a->length; t++) {
        prefetch_row(x->dk + at_k + (t + AHEAD) * a->k_step, a->size);
        prefetch_row(x->dv + at_v + (t + AHEAD) * a->v_step, a->size);
        store_row(a, b.dk + t * width, sample, t, 1, x->dk + at_k + t * a->k_step);
        store_row(a, b.dv + t * width, sample, t, 0, x->dv + at_v + t * a->v_step);
    }
}

void attention_backward(const uint16_t *q, const uint16_t *k, const uint16_t *v, const uint16_t *out,
                        const uint16_t *grad, const float *logs, uint16_t *dq, uint16_t *dk, uint16_t *dv, SETTINGS) {
    Attention a = PROBLEM;
    Tensors x = {q, k, v, out, grad, logs, dq, dk, dv};
    int64_t width = rounded(size);
    int64_t bytes = (rounded(length) + TILE) * width * 14 + QUERIES * (width * 16 + QUERIES * 6) + 8192;
#pragma omp parallel
    {
        TileConfig saved;
        begin_tiles(a.amx, &saved);
        char *memory = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < batch * kv_heads; i++)
            backward_heads(&a, i / kv_heads, i % kv_heads, &x, memory);
        free(memory);
        end_tiles(a.amx, &saved);
    }
}
#endif
