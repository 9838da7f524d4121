/* Products of matrices in fp32: those of some rows and the PANEL columns of the right-hand matrix. The sums of a product
 * remain in registers. */
#ifndef PANELS_H
#define PANELS_H
#include "bf16.h"

#if defined(__AVX512F__) /* 24 of 32 registers hold sums */
#define LANES 16
#define ROWS 12
#elif defined(__AVX__) /* 12 of 16 */
#define LANES 8
#define ROWS 6
#else
#define LANES 4
#define ROWS 4
#endif
#define PANEL (2 * LANES)
#define SQUARE 32 /* a multiple of PANEL */
#define UNROLLED _Pragma("GCC unroll 12")

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* at any address of a float */

/* A matrix whose rows and columns are so many elements apart. */
typedef struct {
    const float *at;
    int64_t row, column;
} Strided;

/* c [rows, PANEL] = a [rows, depth] b [depth, PANEL], plus `from` unless it is NULL: c itself, or with from_row = 0 a
 * row that all rows get */
static inline __attribute__((always_inline)) void rows_of_panel(const int rows, Strided a, const float *b,
                                                                int64_t b_row, int64_t depth, float *c, int64_t c_row,
                                                                const float *from, int64_t from_row) {
    Lanes sum[ROWS][2];
    UNROLLED for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++)
            sum[i][half] = (Lanes){0};
    for (int64_t k = 0; k < depth; k++) {
        Lanes left = *(const Lanes *)(b + k * b_row), right = *(const Lanes *)(b + k * b_row + LANES);
        UNROLLED for (int i = 0; i < rows; i++) {
            float factor = a.at[i * a.row + k * a.column];
            sum[i][0] += factor * left;
            sum[i][1] += factor * right;
        }
    }
    UNROLLED for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++) {
            if (from) /* added last, because a long sum is more exact as the sum of short ones */
                sum[i][half] += *(const Lanes *)(from + i * from_row + half * LANES);
            *(Lanes *)(c + i * c_row + half * LANES) = sum[i][half];
        }
}

/* The same for any number of rows. A row's bits do not depend on the other rows. */
static inline void panel_product(int64_t rows, Strided a, const float *b, int64_t b_row, int64_t depth, float *c,
                                 int64_t c_row, const float *from, int64_t from_row) {
    int64_t i = 0;
#define NEXT_ROWS(COUNT)                                                                                  \
    for (; i + COUNT <= rows; i += COUNT)                                                                 \
        rows_of_panel(COUNT, (Strided){a.at + i * a.row, a.row, a.column}, b, b_row, depth, c + i * c_row, \
                      c_row, from ? from + i * from_row : from, from_row);
    NEXT_ROWS(ROWS)
    NEXT_ROWS(4)
    NEXT_ROWS(1)
#undef NEXT_ROWS
}

/* Five times, for 32 = 2^5, this transposes a square (as in matrices.c). */
static inline void interleave_fp32(const float *restrict in, float *restrict out) {
    for (int i = 0; i < SQUARE * SQUARE / 2; i++) {
        out[2 * i] = in[i];
        out[2 * i + 1] = in[i + SQUARE * SQUARE / 2];
    }
}

/* panel [SQUARE, PANEL] of elements of a head: the transpose of the PANEL positions at x, `step` elements apart */
static void transpose_square(const float *x, int64_t step, float *restrict panel) {
    _Alignas(64) float a[SQUARE * SQUARE], b[SQUARE * SQUARE];
    for (int i = 0; i < PANEL; i++)
        memcpy(a + i * SQUARE, x + i * step, SQUARE * sizeof(float));
    interleave_fp32(a, b), interleave_fp32(b, a), interleave_fp32(a, b), interleave_fp32(b, a), interleave_fp32(a, b);
    for (int i = 0; i < SQUARE; i++)
        memcpy(panel + i * PANEL, b + i * SQUARE, PANEL * sizeof(float));
}

#endif
