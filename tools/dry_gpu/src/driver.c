/* libcuda.so.1, which triton and torch's compiled kernels call. Modules are loaded and launched, and compute nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500 };
enum { SHARED_MEMORY_OPTIN = 97, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, MULTIPROCESSORS = 16, WARP_SIZE = 10 };
enum { POINTER_MEMORY_TYPE = 2, POINTER_ADDRESS = 3, POINTER_HOST = 4, MEMORY_TYPE_DEVICE = 2 };
#define SUCCEEDS(function) int function() { return SUCCESS; }

/* What the stand-in of the runtime, which is loaded first, knows of devices and of memory (see dry_device.h) */
struct range { char *start; size_t size; int kind, device; };
static int ask(const char *name, int otherwise) {
    int (*function)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, name);
    return function ? function() : otherwise;
}
static int is_on_device(unsigned long long address) {
    struct range (*find)(const void *) = (struct range(*)(const void *))dlsym(RTLD_DEFAULT, "dry_find_range");
    return !find || find((void *)address).kind >= 0;
}

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) {
    int (*of_runtime)(int *) = (int (*)(int *))dlsym(RTLD_DEFAULT, "cudaDriverGetVersion");
    *version = 13000;
    return of_runtime ? of_runtime(version) : SUCCESS;
}
int cuGetErrorString(int error, const char **text) { *text = "error of the dry device"; return SUCCESS; }
int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR_OF_DRY_DEVICE"; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
int cuDeviceGetCount(int *number) { *number = ask("dry_device_count", 1); return SUCCESS; }
int cuDeviceGetName(char *name, int size, int device) { name[0] = 0; return SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case CAPABILITY_MAJOR: *value = ask("dry_capability", 80) / 10; break;
    case CAPABILITY_MINOR: *value = ask("dry_capability", 80) % 10; break;
    case SHARED_MEMORY_OPTIN: *value = ask("dry_shared_memory_limit", 99 << 10); break;
    case MULTIPROCESSORS: *value = 108; break;
    case WARP_SIZE: *value = 32; break;
    default: *value = 1024;
    }
    return SUCCESS;
}

/* One context; every handle is some memory that nobody reads. */
static int new_handle(void **handle) { *handle = calloc(1, 64); return SUCCESS; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return SUCCESS; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return SUCCESS; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return SUCCESS; }
int cuModuleLoadData(void **module, const void *image) { return new_handle(module); }
int cuModuleLoadDataEx(void **module, const void *image, unsigned number, void *options, void *values) { return new_handle(module); }
int cuModuleGetFunction(void **function, void *module, const char *name) { return new_handle(function); }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 /* threads of a block */ ? 1024 : attribute == 4 /* registers of a thread */ ? 32 : 0;
    return SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared_memory) {
    *blocks = 2;
    return SUCCESS;
}

/* A kernel fails if its block needs more shared memory than the capability has; static memory is in neither number. */
static int fits(long shared_memory) {
    return shared_memory <= ask("dry_shared_memory_limit", 99 << 10) ? SUCCESS : INVALID_VALUE;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return attribute == 8 /* dynamic shared memory */ ? fits(value) : SUCCESS; }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_memory,
                   void *stream, void **parameters, void **extra) {
    return fits(shared_memory);
}
int cuLaunchKernelEx(const unsigned *config /* 3 + 3 sizes, shared memory, ... */, void *function, void **parameters, void **extra) {
    return fits(config[6]);
}

/* triton asks for the device's address of each pointer, and rejects a tensor of the CPU by this error. */
int cuPointerGetAttribute(void *value, int attribute, unsigned long long address) {
    if (!is_on_device(address))
        return INVALID_VALUE;
    if (attribute == POINTER_ADDRESS || attribute == POINTER_HOST)
        *(unsigned long long *)value = address;
    else
        *(int *)value = attribute == POINTER_MEMORY_TYPE ? MEMORY_TYPE_DEVICE : 0;
    return SUCCESS;
}

SUCCEEDS(cuCtxGetDevice) SUCCEEDS(cuCtxGetLimit) SUCCEEDS(cuCtxPopCurrent_v2) SUCCEEDS(cuCtxPushCurrent_v2)
SUCCEEDS(cuCtxSetCurrent) SUCCEEDS(cuCtxSetLimit) SUCCEEDS(cuCtxSynchronize) SUCCEEDS(cuDeviceGetUuid)
SUCCEEDS(cuDevicePrimaryCtxRelease_v2) SUCCEEDS(cuDeviceTotalMem_v2) SUCCEEDS(cuEventCreate) SUCCEEDS(cuEventRecord)
SUCCEEDS(cuEventSynchronize) SUCCEEDS(cuFuncGetModule) SUCCEEDS(cuFuncLoad)
SUCCEEDS(cuFuncSetCacheConfig) SUCCEEDS(cuGraphKernelNodeSetAttribute) SUCCEEDS(cuKernelGetFunction)
SUCCEEDS(cuLaunchCooperativeKernel) SUCCEEDS(cuLibraryGetKernel)
SUCCEEDS(cuLibraryLoadData) SUCCEEDS(cuLinkAddData_v2) SUCCEEDS(cuLinkComplete) SUCCEEDS(cuLinkCreate_v2)
SUCCEEDS(cuMemAdvise) SUCCEEDS(cuMemAlloc_v2) SUCCEEDS(cuMemFreeHost) SUCCEEDS(cuMemFree_v2)
SUCCEEDS(cuMemGetHandleForAddressRange) SUCCEEDS(cuMemHostAlloc) SUCCEEDS(cuMemPrefetchAsync) SUCCEEDS(cuMemcpyDtoH_v2)
SUCCEEDS(cuMemcpyHtoD_v2) SUCCEEDS(cuMemsetD8_v2) SUCCEEDS(cuModuleGetGlobal_v2) SUCCEEDS(cuModuleLoad)
SUCCEEDS(cuModuleUnload) SUCCEEDS(cuOccupancyMaxActiveClusters) SUCCEEDS(cuStreamCreate) SUCCEEDS(cuStreamGetCtx)
SUCCEEDS(cuStreamSynchronize) SUCCEEDS(cuStreamWaitEvent) SUCCEEDS(cuStreamWriteValue32)
SUCCEEDS(cuTensorMapEncodeIm2col) SUCCEEDS(cuTensorMapEncodeTiled) SUCCEEDS(cuTensorMapReplaceAddress)

/* nvrtc asks for a table of its cache, and does without one */
int cuGetExportTable(const void **table, const void *id) { *table = NULL; return NOT_FOUND; }

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, void *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    return *function ? SUCCESS : NOT_FOUND;
}
