/* Transposed copies of matrices, and the sums of their columns: for the gradients of linear layers. */
#include "bf16.h"
#include "columns.h"

#define TILE 32
#define TILE_ROWS 512 /* rows after which the next tiles begin: their pages stay in the table of recent addresses */

/* out[2 i] = in[i], out[2 i + 1] = in[i + half]. Five times, for 32 = 2^5, this transposes a tile. */
static inline void interleave(const uint16_t *restrict in, uint16_t *restrict out) {
    for (int i = 0; i < TILE * TILE / 2; i++) {
        out[2 * i] = in[i];
        out[2 * i + 1] = in[i + TILE * TILE / 2];
    }
}

static inline void transpose_tile(const uint16_t *restrict x, int64_t columns, uint16_t *restrict out, int64_t rows) {
    _Alignas(64) uint16_t a[TILE * TILE], b[TILE * TILE];
    for (int i = 0; i < TILE; i++) {
        prefetch_line(x + (i + TILE) * columns), prefetch_line(out + i * rows + TILE); /* the next tile */
        memcpy(a + i * TILE, x + i * columns, 2 * TILE);
    }
    interleave(a, b), interleave(b, a), interleave(a, b), interleave(b, a), interleave(a, b);
    for (int i = 0; i < TILE; i++)
        memcpy(out + i * rows, b + i * TILE, 2 * TILE);
}

/* out [columns, rows] is the transposed x [rows, columns] */
void transpose(const uint16_t *restrict x, uint16_t *restrict out, int64_t rows, int64_t columns) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t first = 0; first < rows; first += TILE_ROWS)
        for (int64_t column = 0; column < columns; column += TILE) {
            int64_t end = smaller(first + TILE_ROWS, rows);
            for (int64_t row = first; row < end; row += TILE) {
                if (end - row >= TILE && columns - column >= TILE) {
                    transpose_tile(x + row * columns + column, columns, out + column * rows + row, rows);
                    continue;
                }
                for (int64_t i = row; i < end && i < row + TILE; i++)
                    for (int64_t j = column; j < columns && j < column + TILE; j++)
                        out[j * rows + i] = x[i * columns + j];
            }
        }
}

/* out [columns]: the sums of the columns of x. partial: fp32 [block_count(rows), columns]. */
void column_sum(const uint16_t *restrict x, float *restrict partial, uint16_t *restrict out, int64_t rows,
                int64_t columns) {
    int64_t blocks = block_count(rows);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        float *restrict sum = partial + block * columns;
        int64_t row = block * BLOCK_ROWS, end = smaller(row + BLOCK_ROWS, rows);
        memset(sum, 0, (size_t)columns * sizeof(float));
        for (; row + 4 <= end; row += 4) {
            const uint16_t *restrict first = x + row * columns;
#pragma omp simd
            for (int64_t j = 0; j < columns; j++)
                sum[j] += (to_float(first[j]) + to_float(first[j + columns])) +
                          (to_float(first[j + 2 * columns]) + to_float(first[j + 3 * columns]));
        }
        for (; row < end; row++)
            for (int64_t j = 0; j < columns; j++)
                sum[j] += to_float(x[row * columns + j]);
    }
    sum_blocks(partial, blocks, columns);
    for (int64_t j = 0; j < columns; j++)
        out[j] = to_bf16(partial[j]);
}
