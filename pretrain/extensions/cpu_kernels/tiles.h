/* Products of tiles of 32 x 32 elements of bf16 matrices with fp32 sums, and the memory layouts that they need.
 *
 * The left matrix is stored by rows. The right matrix is stored by pairs of rows, as the processor's dot products read
 * it: element (k, n) is at [k / 2][n][k % 2]. All sizes are multiples of TILE = 32.
 * The intrinsics are those of Intel's AMX (tiles) and AVX512_BF16 (vectors), because compilers generate neither.
 */
#ifndef TILES_H
#define TILES_H
#include "bf16.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__x86_64__) && \
    defined(__linux__)
#define HAS_BF16_PRODUCTS
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE = 32 };

static inline int may_use_amx(void) { /* Linux gives the tiles' 8 KiB of state only to processes that ask for it */
#ifdef __AMX_BF16__
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

/* The intrinsics of GCC 12 do not say which memory they read and write. */
#define MEMORY_IS_READ __asm__ volatile("" ::: "memory")

/* Configure the tiles, and store the former configuration in `saved`: oneDNN may continue to use it. */
static inline void begin_tiles(int amx, TileConfig *saved) {
#ifdef __AMX_BF16__
    static const TileConfig config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    if (amx) {
        memset(saved, 0, sizeof(*saved));
        MEMORY_IS_READ;
        _tile_storeconfig(saved);
        _tile_loadconfig(&config);
        MEMORY_IS_READ;
    }
#endif
    (void)amx, (void)saved;
}

static inline void end_tiles(int amx, const TileConfig *saved) {
#ifdef __AMX_BF16__
    MEMORY_IS_READ;
    if (amx && saved->palette) _tile_loadconfig(saved);
    else if (amx) _tile_release();
#endif
    (void)amx, (void)saved;
}

#ifdef __AMX_BF16__
static inline void product_amx(const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, int64_t depth, float *c,
                               int64_t ldc, int add) {
    MEMORY_IS_READ;
    if (add) {
        _tile_loadd(0, c, ldc * 4);
        _tile_loadd(1, c + 16, ldc * 4);
        _tile_loadd(2, c + 16 * ldc, ldc * 4);
        _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += 32) {
        _tile_loadd(4, a + k, lda * 2);
        _tile_loadd(6, b + k * ldb, ldb * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + k * ldb + 32, ldb * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 16 * lda + k, lda * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16, ldc * 4);
    _tile_stored(2, c + 16 * ldc, ldc * 4);
    _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
}
#endif

static inline void product_vectors(const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, int64_t depth,
                                   float *c, int64_t ldc, int add) {
    enum { ROWS = 8 };
    for (int row = 0; row < TILE; row += ROWS, a += ROWS * lda, c += ROWS * ldc) {
        __m512 sums[ROWS][2];
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < 2; j++) sums[i][j] = add ? _mm512_loadu_ps(c + i * ldc + 16 * j) : _mm512_setzero_ps();
        for (int64_t k = 0; k < depth; k += 2) {
            __m512bh left = (__m512bh)_mm512_loadu_si512(b + k * ldb);
            __m512bh right = (__m512bh)_mm512_loadu_si512(b + k * ldb + 32);
            for (int i = 0; i < ROWS; i++) {
                int32_t pair;
                memcpy(&pair, a + i * lda + k, 4);
                sums[i][0] = _mm512_dpbf16_ps(sums[i][0], (__m512bh)_mm512_set1_epi32(pair), left);
                sums[i][1] = _mm512_dpbf16_ps(sums[i][1], (__m512bh)_mm512_set1_epi32(pair), right);
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < 2; j++) _mm512_storeu_ps(c + i * ldc + 16 * j, sums[i][j]);
    }
}

/* c[32, 32] = a[32, depth] b[depth, 32], or with `add` the sum of this and c. ld*: elements or pairs in a row. */
static inline void product(int amx, const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, int64_t depth,
                           float *c, int64_t ldc, int add) {
#ifdef __AMX_BF16__
    if (amx) {
        product_amx(a, lda, b, ldb, depth, c, ldc, add);
        return;
    }
#endif
    (void)amx;
    product_vectors(a, lda, b, ldb, depth, c, ldc, add);
}

/* Store x[rows, width] by pairs of rows. */
static inline void pair_rows(const uint16_t *x, int64_t rows, int64_t width, uint16_t *out) {
    for (int64_t r = 0; r < rows; r += 2) {
        uint32_t *restrict pairs = (uint32_t *)(out + r * width);
        const uint16_t *restrict even = x + r * width, *restrict odd = even + width;
        for (int64_t i = 0; i < width; i++) pairs[i] = (uint32_t)even[i] | (uint32_t)odd[i] << 16;
    }
}

/* Store the transpose of x[rows, width] by pairs of its rows: out[width / 2][rows][2]. */
static inline void pair_columns(const uint16_t *x, int64_t rows, int64_t width, uint16_t *out) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i offsets = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)(width / 2)));
    for (int64_t pair = 0; pair < width / 2; pair++)
        for (int64_t r = 0; r < rows; r += 16)
            _mm512_storeu_si512(out + 2 * (pair * rows + r),
                                _mm512_i32gather_epi32(offsets, x + r * width + 2 * pair, 4));
}

/* Store the transpose of 32 rows x[32, width]. */
static inline void transpose_rows(const uint16_t *x, int64_t width, uint16_t *out, int64_t pitch) {
    uint32_t pairs[TILE];
    for (int64_t column = 0; column < width; column += 2) {
        for (int i = 0; i < TILE; i++) memcpy(pairs + i, x + i * width + column, 4);
        for (int i = 0; i < TILE; i++) out[column * pitch + i] = (uint16_t)pairs[i];
        for (int i = 0; i < TILE; i++) out[(column + 1) * pitch + i] = (uint16_t)(pairs[i] >> 16);
    }
}

/* 2^t, at most 3e-6 from it, relatively. */
static inline __m512 exp2_16(__m512 t) {
    t = _mm512_max_ps(_mm512_set1_ps(-1000.0f), t); /* NaN remains */
    __m512 part = _mm512_reduce_ps(t, 1);           /* t - floor(t) */
    __m512 power = _mm512_set1_ps(1.353415e-2f);
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(5.201149e-2f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(2.4144274e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(6.9300384e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.0000026f));
    return _mm512_scalef_ps(power, t);
}

#endif
#endif
