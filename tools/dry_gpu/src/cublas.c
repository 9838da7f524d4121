/* cuBLAS: handles are memory of the host. Products are in no_effect.c. */
#include <stdlib.h>
#include <string.h>

enum { HANDLE_BYTES = 4096 };  /* larger than each structure of cuBLAS that a caller may look into */
static int new_handle(void **handle) { *handle = calloc(1, HANDLE_BYTES); return 0; }
static int delete_handle(void *handle) { free(handle); return 0; }

int cublasCreate_v2(void **handle) { return new_handle(handle); }
int cublasDestroy_v2(void *handle) { return delete_handle(handle); }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }

int cublasLtCreate(void **handle) { return new_handle(handle); }
int cublasLtDestroy(void *handle) { return delete_handle(handle); }
int cublasLtMatmulDescCreate(void **product, int compute_type, int scale_type) { return new_handle(product); }
int cublasLtMatmulDescDestroy(void *product) { return delete_handle(product); }
int cublasLtMatmulPreferenceCreate(void **preference) { return new_handle(preference); }
int cublasLtMatmulPreferenceDestroy(void *preference) { return delete_handle(preference); }
int cublasLtMatrixLayoutCreate(void **layout, int type, unsigned long rows, unsigned long columns, long leading) {
    return new_handle(layout);
}
int cublasLtMatrixLayoutDestroy(void *layout) { return delete_handle(layout); }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    memset(results, 0, 64);  /* the first result: an algorithm without a workspace, and the status of success */
    *found = 1;
    return 0;
}
