/* Functions of the CUDA runtime, cuBLAS and NCCL that succeed and do nothing: matrix products, whatever orders work that
 * is complete already, and settings. (The headers are not included, so that one line declares each function.) */
#define SUCCEEDS(function) int function() { return 0; }

/* device.c: errors (none is left behind), streams, events, memory pools, peers, symbols */
SUCCEEDS(cudaGetLastError) SUCCEEDS(cudaPeekAtLastError) SUCCEEDS(cudaDeviceEnablePeerAccess) SUCCEEDS(cudaMemcpyToSymbol)
SUCCEEDS(cudaStreamDestroy) SUCCEEDS(cudaStreamQuery) SUCCEEDS(cudaStreamWaitEvent)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode) SUCCEEDS(cudaMemPoolSetAttribute) SUCCEEDS(cudaMemPoolTrimTo)
SUCCEEDS(cudaEventQuery) SUCCEEDS(cudaProfilerStart) SUCCEEDS(cudaProfilerStop)

/* cublas.c */
SUCCEEDS(cublasSetStream_v2) SUCCEEDS(cublasSetWorkspace_v2) SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2) SUCCEEDS(cublasSetSmCountTarget)
SUCCEEDS(cublasGemmEx) SUCCEEDS(cublasSgemmEx) SUCCEEDS(cublasSgemm_v2) SUCCEEDS(cublasDgemm_v2)
SUCCEEDS(cublasGemmStridedBatchedEx) SUCCEEDS(cublasSgemmStridedBatched) SUCCEEDS(cublasDgemmStridedBatched)
SUCCEEDS(cublasSgemv_v2) SUCCEEDS(cublasDgemv_v2) SUCCEEDS(cublasSdot_v2) SUCCEEDS(cublasDdot_v2) SUCCEEDS(cublasDotEx)
SUCCEEDS(cublasLtMatmul) SUCCEEDS(cublasLtMatmulDescSetAttribute) SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)

/* nccl.c */
SUCCEEDS(ncclCommFinalize) SUCCEEDS(ncclCommDeregister) SUCCEEDS(ncclRedOpDestroy)
