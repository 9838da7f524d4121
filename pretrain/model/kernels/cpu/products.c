/* Products of matrices in fp32 with any strides: outputs and gradients of linear layers.
 *
 * The right-hand matrix is copied into panels of PANEL columns, of which one stays in the first cache while it is
 * multiplied by all rows of a block. Nothing is copied of the left-hand one. Each element is the sum of its products
 * in their order, so that the result depends neither on the number of threads nor on the other rows.
 */
#include <stdlib.h>
#include "products.h"

#define DEPTH 128     /* products after which the sums are stored: the error grows with this number */
#define BLOCK_ROWS 48 /* rows and columns of a thread's unit of work */
#define BLOCK_COLUMNS 128

/* c [rows, columns], contiguous, = a [rows, depth] b [depth, columns] + bias, which may be NULL */
void product_fp32(const float *a, int64_t a_row, int64_t a_column, const float *b, int64_t b_row, int64_t b_column,
                  const float *bias, float *c, int64_t rows, int64_t columns, int64_t depth) {
    float *panels = aligned_alloc(64, (size_t)(DEPTH * (columns + PANEL)) * sizeof(float));
#pragma omp parallel
    for (int64_t from = 0; from < depth; from += DEPTH) {
        int64_t count = depth - from < DEPTH ? depth - from : DEPTH;
#pragma omp for schedule(static)
        for (int64_t column = 0; column < columns; column += PANEL) {
            int64_t width = columns - column < PANEL ? columns - column : PANEL;
            Strided part = {b + from * b_row + column * b_column, b_row, b_column};
            copy_panel(part, width, count, panels + column * count);
        }
#pragma omp for collapse(2) schedule(static)
        for (int64_t row = 0; row < rows; row += BLOCK_ROWS)
            for (int64_t first = 0; first < columns; first += BLOCK_COLUMNS) {
                int64_t height = rows - row < BLOCK_ROWS ? rows - row : BLOCK_ROWS;
                for (int64_t column = first; column < columns && column < first + BLOCK_COLUMNS; column += PANEL) {
                    int64_t width = columns - column < PANEL ? columns - column : PANEL;
                    float *to = c + row * columns + column;
                    Strided left = {a + row * a_row + from * a_column, a_row, a_column};
                    Strided start = {from ? to : bias ? bias + column : NULL, from ? columns : 0, 1};
                    if (width == PANEL) {
                        panel_product(height, left, panels + column * count, PANEL, count, start, to, columns);
                        continue;
                    }
                    float sums[BLOCK_ROWS * PANEL] = {0};
                    for (int64_t i = 0; i < height && start.at; i++)
                        memcpy(sums + i * PANEL, start.at + i * start.row, (size_t)width * sizeof(float));
                    panel_product(height, left, panels + column * count, PANEL, count, (Strided){sums, PANEL, 1}, sums,
                                  PANEL);
                    for (int64_t i = 0; i < height; i++)
                        memcpy(to + i * columns, sums + i * PANEL, (size_t)width * sizeof(float));
                }
            }
    }
    free(panels);
}
