/* Products of matrices in fp32, PANEL columns at a time, whose sums remain in registers; copies of columns. */
#ifndef PRODUCTS_H
#define PRODUCTS_H
#include <stdint.h>
#include <string.h>

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
#define SQUARE 32 /* at least PANEL */

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* at any address of a float */
#define UNROLLED _Pragma("GCC unroll 12")
#define INLINE static inline __attribute__((always_inline))

/* A matrix whose rows and columns are so many elements apart. */
typedef struct {
    const float *at;
    int64_t row, column;
} Strided;

static inline Strided from_row(Strided a, int64_t i) { return (Strided){a.at + i * a.row, a.row, a.column}; }

/* c [rows, PANEL] = start + a [rows, depth] b [depth, PANEL]; start.at may be NULL or c, and start.row may be 0. */
INLINE void rows_of_panel(const int rows, Strided a, const float *b, int64_t b_row, int64_t depth, Strided start,
                          float *c, int64_t c_row) {
    Lanes sum[ROWS][2];
    UNROLLED for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++)
            sum[i][half] = start.at ? *(const Lanes *)(start.at + i * start.row + half * LANES) : (Lanes){0};
    for (int64_t k = 0; k < depth; k++) {
        Lanes left = *(const Lanes *)(b + k * b_row), right = *(const Lanes *)(b + k * b_row + LANES);
        UNROLLED for (int i = 0; i < rows; i++) {
            float factor = a.at[i * a.row + k * a.column];
            sum[i][0] += factor * left;
            sum[i][1] += factor * right;
        }
    }
    UNROLLED for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++)
            *(Lanes *)(c + i * c_row + half * LANES) = sum[i][half];
}

/* The same for any number of rows. */
static inline void panel_product(int64_t rows, Strided a, const float *b, int64_t b_row, int64_t depth, Strided start,
                                 float *c, int64_t c_row) {
    int64_t i = 0;
#define NEXT_ROWS(COUNT)                                                                                  \
    for (; i + COUNT <= rows; i += COUNT)                                                                 \
        rows_of_panel(COUNT, from_row(a, i), b, b_row, depth, from_row(start, start.at ? i : 0), c + i * c_row, c_row);
    NEXT_ROWS(ROWS)
    NEXT_ROWS(4)
    NEXT_ROWS(1)
#undef NEXT_ROWS
}

/* Five times, for 32 = 2^5, this transposes a tile (matrices.c). */
static inline void interleave(const float *restrict in, float *restrict out) {
    for (int i = 0; i < SQUARE * SQUARE / 2; i++) {
        out[2 * i] = in[i];
        out[2 * i + 1] = in[i + SQUARE * SQUARE / 2];
    }
}

/* to [SQUARE, PANEL] from the columns of a matrix whose columns are contiguous */
static void copy_transposed_tile(Strided b, float *restrict to) {
    _Alignas(64) float x[SQUARE * SQUARE], y[SQUARE * SQUARE];
    for (int i = 0; i < PANEL; i++)
        memcpy(x + i * SQUARE, b.at + i * b.column, SQUARE * sizeof(float));
    interleave(x, y), interleave(y, x), interleave(x, y), interleave(y, x), interleave(x, y);
    for (int i = 0; i < SQUARE; i++)
        memcpy(to + i * PANEL, y + i * SQUARE, PANEL * sizeof(float));
}

/* to [depth, PANEL] from b [depth, width], with zeros after it */
static void copy_panel(Strided b, int64_t width, int64_t depth, float *restrict to) {
    for (int64_t k = 0; k < depth; k++) {
        const float *restrict from = b.at + k * b.row;
        if (width == PANEL && b.column == 1) {
            memcpy(to + k * PANEL, from, PANEL * sizeof(float));
        } else if (width == PANEL && b.row == 1 && depth - k >= SQUARE) {
            copy_transposed_tile((Strided){from, 1, b.column}, to + k * PANEL);
            k += SQUARE - 1;
        } else {
            for (int64_t j = 0; j < PANEL; j++)
                to[k * PANEL + j] = j < width ? from[j * b.column] : 0.0f;
        }
    }
}

#endif
