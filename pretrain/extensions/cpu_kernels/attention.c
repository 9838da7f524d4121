/* Causal attention in bf16: forward pass, 32 queries at a time. */
#include "attention.h"

#ifdef HAS_BF16_PRODUCTS

enum {
    KEYS = 512,          /* computed together */
    S_PITCH = KEYS + 16, /* not a multiple of 4 KiB, for which the cache has only one set */
    P_PITCH = KEYS + 32
};

/* Soft-cap the scaled scores of one query and keys first_key .. + count, and add ALiBi; in units of log2(e). */
static void cap_and_add(const Attention *a, int64_t head, int64_t distance, int64_t count, float *s) {
    float slope = a->slopes ? a->slopes[head] * LOG2E : 0.0f;
    for (int64_t j = 0; j < count; j++) {
        float x = s[j] * a->scale;
        x = a->softcap ? a->softcap * (2.0f * sigmoid(2.0f * x / a->softcap) - 1.0f) : x;
        s[j] = x * LOG2E + slope * (float)(distance + j);
    }
}

typedef struct { /* what the blocks of a head share */
    int64_t length, width; /* rounded to blocks */
    uint16_t *k_pairs, *v_pairs, *q_rows, *p;
    float *s, *out;
} Forward;

typedef struct { /* of the queries of a block */
    float maxima[TILE], sums[TILE], factors[TILE];
    int32_t low[TILE], high[TILE]; /* visible keys of those that are computed now */
} Rows;

/* The 16 columns from `column` on that are visible to row i. */
static inline __mmask16 visible(const Rows *r, int i, int64_t column) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i columns = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)column - r->low[i]));
    return _mm512_cmplt_epu32_mask(columns, _mm512_set1_epi32(r->high[i] - r->low[i]));
}

/* P for `count` keys. Maxima and sums include these keys; factors are for what the former maxima were used for. */
static void softmax_rows(const float *s, float scale, int64_t count, Rows *r, uint16_t *p) {
    float largest[TILE], totals[TILE];
    for (int i = 0; i < TILE; i++) {
        __m512 x = _mm512_set1_ps(-1e30f);
        for (int64_t j = 0; j < count; j += 16)
            x = _mm512_mask_max_ps(x, visible(r, i, j), _mm512_loadu_ps(s + i * S_PITCH + j), x); /* ignores NaN */
        largest[i] = _mm512_reduce_max_ps(x) * scale;
    }
    for (int i = 0; i < TILE; i += 16) {
        __m512 before = _mm512_loadu_ps(r->maxima + i), now = _mm512_max_ps(before, _mm512_loadu_ps(largest + i));
        _mm512_storeu_ps(r->maxima + i, now);
        _mm512_storeu_ps(r->factors + i, exp2_16(_mm512_sub_ps(before, now)));
    }
    for (int i = 0; i < TILE; i++) {
        __m512 total = _mm512_setzero_ps(), maximum = _mm512_set1_ps(r->maxima[i]);
        for (int64_t j = 0; j < count; j += 16) {
            __m512 x = _mm512_loadu_ps(s + i * S_PITCH + j);
            x = exp2_16(_mm512_fmsub_ps(x, _mm512_set1_ps(scale), maximum));
            x = _mm512_maskz_mov_ps(visible(r, i, j), x);
            total = _mm512_add_ps(total, x);
            _mm256_storeu_si256((__m256i *)(p + i * P_PITCH + j), (__m256i)_mm512_cvtneps_pbh(x));
        }
        totals[i] = _mm512_reduce_add_ps(total);
    }
    for (int i = 0; i < TILE; i++) r->sums[i] = r->sums[i] * r->factors[i] + totals[i];
}

static void forward_block(const Attention *a, const Forward *f, int64_t head, int64_t start, const int32_t *first,
                          uint16_t *out, float *logs) {
    int special = a->softcap || a->slopes;
    int64_t width = f->width, rows = smaller(TILE, a->length - start), stop = start + TILE;
    int64_t begin = first[start] / TILE * TILE;
    Rows r;
    for (int i = 0; i < TILE; i++) r.maxima[i] = -1e30f, r.sums[i] = 0.0f;
    for (int64_t from = begin; from < stop; from += KEYS) {
        int64_t count = smaller(KEYS, stop - from);
        for (int64_t key = 0; key < count; key += TILE)
            product(a->amx, f->q_rows, width, f->k_pairs + (from + key) * width, TILE, width, f->s + key, S_PITCH, 0);
        for (int64_t i = 0; i < TILE; i++) {
            r.low[i] = (int32_t)larger(first[smaller(start + i, a->length - 1)] - from, 0);
            r.high[i] = (int32_t)larger(smaller(start + i + 1 - from, count), r.low[i]);
            if (special) cap_and_add(a, head, from - start - i, count, f->s + i * S_PITCH);
        }
        softmax_rows(f->s, special ? 1.0f : a->scale * LOG2E, count, &r, f->p);
        for (int64_t i = 0; i < TILE && from > begin; i++)
            for (int64_t e = 0; e < width; e++) f->out[i * width + e] *= r.factors[i];
        for (int64_t e = 0; e < width; e += TILE)
            product(a->amx, f->p, P_PITCH, f->v_pairs + from * width + 2 * e, width, count, f->out + e, width,
                    from > begin);
    }
    for (int64_t i = 0; i < rows; i++) {
        float inverse = 1.0f / r.sums[i];
        uint16_t *restrict row = out + (start + i) * a->heads * a->size;
        for (int64_t e = 0; e < a->size; e++) row[e] = to_bf16(f->out[i * width + e] * inverse);
        logs[start + i] = r.maxima[i] + log2f(r.sums[i]);
    }
}

static void forward_heads(const Attention *a, int64_t sample, int64_t kv_head, const uint16_t *q, const uint16_t *k,
                          const uint16_t *v, uint16_t *out, float *logs, char *memory) {
    Forward f = {.length = rounded(a->length), .width = rounded(a->size)};
    uint16_t *rows = take(&memory, f.length * f.width * 2);
    f.k_pairs = take(&memory, f.length * f.width * 2), f.v_pairs = take(&memory, f.length * f.width * 2);
    f.q_rows = take(&memory, TILE * f.width * 2), f.p = take(&memory, TILE * P_PITCH * 2);
    f.s = take(&memory, TILE * S_PITCH * 4), f.out = take(&memory, TILE * f.width * 4);
    int64_t positions = sample * a->length, group = a->heads / a->kv_heads;
    load_rows(a, v + positions * a->v_step + kv_head * a->size, a->v_step, sample, 0, f.length, f.width, 0, rows);
    pair_rows(rows, f.length, f.width, f.v_pairs);
    load_rows(a, k + positions * a->k_step + kv_head * a->size, a->k_step, sample, 0, f.length, f.width, 1, rows);
    for (int64_t key = 0; key < f.length; key += TILE)
        pair_columns(rows + key * f.width, TILE, f.width, f.k_pairs + key * f.width);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int64_t start = 0; start < a->length; start += TILE) {
            load_rows(a, q + positions * a->q_step + head * a->size, a->q_step, sample, start, TILE, f.width, 1,
                      f.q_rows);
            forward_block(a, &f, head, start, a->first + sample * a->first_step,
                          out + (positions * a->heads + head) * a->size, logs + (sample * a->heads + head) * a->length);
        }
}

/* What the products use: 1 vectors, 2 tiles; 0: this processor has neither, and there are no other functions. */
void attention_instructions(int64_t *result) { *result = may_use_amx() ? 2 : 1; }

void attention(const uint16_t *q, const uint16_t *k, const uint16_t *v, uint16_t *out, float *logs, SETTINGS) {
    Attention a = PROBLEM;
    int64_t width = rounded(size);
    int64_t bytes = rounded(length) * width * 6 + TILE * (width * 6 + S_PITCH * 4 + P_PITCH * 2) + 1024;
#pragma omp parallel
    {
        TileConfig saved;
        begin_tiles(a.amx, &saved);
        char *memory = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < batch * kv_heads; i++)
            forward_heads(&a, i / kv_heads, i % kv_heads, q, k, v, out, logs, memory);
        free(memory);
        end_tiles(a.amx, &saved);
    }
}
#else
void attention_instructions(int64_t *result) { *result = 0; }
#endif
