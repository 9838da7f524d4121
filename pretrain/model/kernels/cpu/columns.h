/* Sums over the rows of a matrix: first of each block of rows, then over the blocks. The blocks and the order of the
 * additions do not depend on the number of threads, and neither does the result. */
#ifndef COLUMNS_H
#define COLUMNS_H
#include "bf16.h"

#define BLOCK_ROWS 64 /* kernels/cpu/c_functions.py repeats it */

static inline int64_t block_count(int64_t rows) {
    return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
}

/* out [columns] = the sum of partial [blocks, columns] over the blocks */
static inline void sum_blocks(const float *restrict partial, int64_t blocks, int64_t columns, uint16_t *restrict out) {
#pragma omp parallel for schedule(static)
    for (int64_t start = 0; start < columns; start += 64) {
        int64_t count = columns - start < 64 ? columns - start : 64;
        float sum[64] = {0};
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t j = 0; j < count; j++)
                sum[j] += partial[block * columns + start + j];
        for (int64_t j = 0; j < count; j++)
            out[start + j] = to_bf16(sum[j]);
    }
}

#endif
