/* Products of matrices in fp32 for linear layers.
 *
 * A task computes some rows and columns of the result. It adds DEPTH products to each sum at a time: so much of the
 * task's rows stays in the L2 cache, and a panel of the right-hand matrix in the L1 cache. The order of the additions,
 * and therefore the result, does not depend on the tasks. */
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#endif
#include "panels.h"

#define DEPTH 256
#define MOST_ROWS 768 /* a multiple of ROWS */
#define MOST_COLUMNS 512

/* panel [depth, PANEL] of b, with zeros after its last column */
static void pack(Strided b, int64_t depth, int64_t columns, float *restrict panel) {
    int64_t k = 0;
    if (columns == PANEL && b.column == 1)
        for (; k < depth; k++)
            memcpy(panel + k * PANEL, b.at + k * b.row, PANEL * sizeof(float));
    if (columns == PANEL && b.row == 1)
        for (; k + SQUARE <= depth; k += SQUARE)
            transpose_square(b.at + k, b.column, panel + k * PANEL);
    for (; k < depth; k++)
        for (int64_t j = 0; j < PANEL; j++)
            panel[k * PANEL + j] = j < columns ? b.at[k * b.row + j * b.column] : 0.0f;
}

static void copy_columns(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t rows,
                         int64_t columns) {
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + i * to_row, from + i * from_row, (size_t)columns * sizeof(float));
}

/* c [rows, columns] = a [rows, depth] b [depth, columns] + bias [columns], or without a bias */
static void block_product(Strided a, Strided b, const float *bias, float *c, int64_t c_row, int64_t rows, int64_t depth,
                          int64_t columns) {
    _Alignas(64) float panel[DEPTH * PANEL], last[MOST_ROWS * PANEL]; /* last: a panel that has fewer columns */
    for (int64_t k = 0; k < depth; k += DEPTH)
        for (int64_t j = 0; j < columns; j += PANEL) {
            int64_t count = smaller(DEPTH, depth - k), width = smaller(PANEL, columns - j), to_row = c_row, from_row = 0;
            float *to = c + j, first[PANEL] = {0};
            const float *from = NULL;
            pack((Strided){b.at + k * b.row + j * b.column, b.row, b.column}, count, width, panel);
            if (width < PANEL) {
                to = last, to_row = PANEL;
                copy_columns(last, PANEL, c + j, c_row, k ? rows : 0, width);
            }
            if (k)
                from = to, from_row = to_row;
            else if (bias)
                from = memcpy(first, bias + j, (size_t)width * sizeof(float));
            if (a.column == 1) /* the compiler makes a loop of its own for each order */
                panel_product(rows, (Strided){a.at + k, a.row, 1}, panel, PANEL, count, to, to_row, from, from_row);
            else
                panel_product(rows, (Strided){a.at + k * a.column, 1, a.column}, panel, PANEL, count, to, to_row, from,
                              from_row);
            if (width < PANEL)
                copy_columns(c + j, c_row, last, PANEL, rows, width);
        }
}

/* out [rows, columns] = a b + bias, which may be NULL. a is [rows, depth], or [depth, rows] if `a_transposed`; b is
 * [depth, columns], or [columns, depth] if `b_transposed`. */
void product_fp32(const float *a, const float *b, const float *bias, float *out, int64_t rows, int64_t depth,
                  int64_t columns, int64_t a_transposed, int64_t b_transposed) {
    Strided left = {a, a_transposed ? 1 : depth, a_transposed ? rows : 1};
    Strided right = {b, b_transposed ? 1 : columns, b_transposed ? depth : 1};
    int64_t per_thread = rows * ((columns + MOST_COLUMNS - 1) / MOST_COLUMNS) / omp_get_max_threads();
    int64_t block = larger(ROWS, smaller(MOST_ROWS, (per_thread + ROWS - 1) / ROWS * ROWS));
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t i = 0; i < rows; i += block)
        for (int64_t j = 0; j < columns; j += MOST_COLUMNS)
            block_product((Strided){left.at + i * left.row, left.row, left.column},
                          (Strided){right.at + j * right.column, right.row, right.column}, bias ? bias + j : bias,
                          out + i * columns + j, columns, smaller(block, rows - i), depth,
                          smaller(MOST_COLUMNS, columns - j));
}
