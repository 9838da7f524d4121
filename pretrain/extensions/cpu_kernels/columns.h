/* Sums over the rows of a matrix: first of each block of rows, then over the blocks. The blocks and the order of the
 * additions do not depend on the number of threads, and neither does the result. */
#ifndef COLUMNS_H
#define COLUMNS_H
#include "bf16.h"

#define BLOCK_ROWS 64 /* c_functions.py repeats it */

static inline int64_t block_count(int64_t rows) {
    return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
}

/* The first row of partial [blocks, columns] becomes the sum of its rows. */
static inline void sum_blocks(float *restrict partial, int64_t blocks, int64_t columns) {
#pragma omp parallel for schedule(static)
    for (int64_t start = 0; start < columns; start += 64) {
        int64_t stop = start + 64 < columns ? start + 64 : columns;
        for (int64_t block = 1; block < blocks; block++)
            for (int64_t j = start; j < stop; j++)
                partial[j] += partial[block * columns + j];
    }
}

#endif
