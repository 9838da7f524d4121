/* Devices, streams, events and kernels of the CUDA runtime. Everything that is launched is complete at once; a kernel
 * is checked as the hardware would check it, and then does nothing. */
#define _GNU_SOURCE
#include "dry_device.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static __thread int current;
int dry_current_device(void) { return current; }

static int from_environment(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

int dry_has_fault(const char *name) {
    const char *text = getenv("DRY_GPU_FAULT");
    return text && !strcmp(text, name);
}

/* The devices that the process sees, as the driver reads CUDA_VISIBLE_DEVICES: it ends at the first word that names no
 * device, a repeated device leaves none, and a program gets one MIG instance at most. */
static int visible[MAX_DEVICES];
static int read_visible(void) {
    int number = 0, all = from_environment("DRY_GPU_COUNT", 1);
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; !text && i < all; i++)
        visible[number++] = i;
    for (; text && *text && number < MAX_DEVICES; text += *text == ',') {
        char *end;
        text += strspn(text, " ");
        int is_mig = !strncmp(text, "MIG-dry-", 8);
        long device = strtol(is_mig || !strncmp(text, "GPU-dry-", 8) ? text + 8 : text, &end, 10);
        if (end == text || device < 0 || device >= all || (*end && *end != ','))
            break;
        for (int i = 0; i < number; i++)
            if (visible[i] == device)
                return 0;
        visible[number++] = device;
        text = end;
        if (is_mig)
            break;
    }
    return number;
}
int dry_device_count(void) {
    static int number = -1;
    return number >= 0 ? number : (number = read_visible());
}

int dry_host_device(void) { return dry_device_count() ? visible[current] : 0; }
int dry_capability(void) { return from_environment("DRY_GPU_CAPABILITY", 80); }

/* DRY_GPU_KINDS is NAME:GIB,NAME:GIB...: the names and sizes of the host's devices, where these differ. */
static int own_kind(int device, char *name, size_t space) {
    const char *text = getenv("DRY_GPU_KINDS");
    for (int i = 0; text && i < visible[device]; i++)
        text = (text = strchr(text, ',')) ? text + 1 : NULL;
    size_t length = text ? strcspn(text, ":,") : 0;
    if (length && name)
        snprintf(name, space, "NVIDIA %.*s (dry)", (int)length, text);
    return length && text[length] == ':' ? atoi(text + length + 1) : 0;
}
size_t dry_capacity(void) {
    int gib = own_kind(current, NULL, 0);
    return (size_t)(gib ? gib : from_environment("DRY_GPU_MEMORY", 80)) << 30;
}
int dry_shared_memory_limit(void) {
    /* CUDA C++ Programming Guide, "Technical specifications per compute capability": 163 and 227 KiB; else 99 */
    int capability = dry_capability();
    return (capability == 80 || capability == 87 ? 163 : capability >= 90 && capability < 120 ? 227 : 99) << 10;
}

/* --- Counts, in a file if DRY_GPU_COUNTERS names one: all ranks then count in the same memory. --- */

static struct counters own_counters;
struct counters *dry_counters = &own_counters;

__attribute__((constructor)) static void share_counters(void) {
    const char *path = getenv("DRY_GPU_COUNTERS");
    if (!path)
        return;
    int file = open(path, O_RDWR | O_CREAT, 0644);
    if (file < 0 || ftruncate(file, sizeof own_counters))
        return;
    void *shared = mmap(NULL, sizeof own_counters, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared != MAP_FAILED)
        dry_counters = shared;
}

static void count(long *counter) { __atomic_add_fetch(counter, 1, __ATOMIC_RELAXED); }

/* --- Devices --- */

cudaError_t cudaGetDeviceCount(int *number) {
    *number = dry_has_fault("old_driver") || dry_has_fault("no_permission") ? 0 : dry_device_count();
    return *number ? cudaSuccess : dry_has_fault("old_driver") ? cudaErrorInsufficientDriver : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= dry_device_count())
        return cudaErrorInvalidDevice;
    if (dry_has_fault("busy"))
        return cudaErrorDevicesUnavailable;
    current = device;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = dry_has_fault("old_driver") ? 12080 : CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= dry_device_count())
        return cudaErrorInvalidDevice;
    memset(properties, 0, sizeof *properties);
    /* the end of the name is how pretrain/distributed/device.py knows that kernels compute nothing */
    snprintf(properties->name, sizeof properties->name, "NVIDIA %s (dry)",
             dry_capability() >= 100 ? "B200" : dry_capability() >= 90 ? "H100 80GB HBM3" : "A100-SXM4-80GB");
    int gib = own_kind(device, properties->name, sizeof properties->name);
    memset(&properties->uuid, device + 1, sizeof properties->uuid);
    properties->totalGlobalMem = gib ? (size_t)gib << 30 : dry_capacity();
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = dry_shared_memory_limit();
    properties->sharedMemPerMultiprocessor = dry_shared_memory_limit() + (1 << 10);
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->major = dry_capability() / 10;
    properties->minor = dry_capability() % 10;
    properties->multiProcessorCount = dry_capability() >= 90 ? 132 : 108;
    properties->l2CacheSize = 50 << 20;
    properties->memoryBusWidth = 5120;
    properties->totalConstMem = 65536;
    properties->managedMemory = properties->unifiedAddressing = 1;
    properties->pciBusID = device + 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = dry_shared_memory_limit(); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = dry_shared_memory_limit() + (1 << 10); break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMultiProcessorCount: *value = dry_capability() >= 90 ? 132 : 108; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *value = dry_capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = dry_capability() % 10; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 0; break;
    default: *value = 1;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { count(&dry_counters->device_waits); return cudaSuccess; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = (cudaMemPool_t)0x10; return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    memset(value, 0, 8);
    return cudaSuccess;
}

/* --- Errors --- */

const char *cudaGetErrorName(cudaError_t error) { return error ? "cudaErrorOfDryDevice" : "cudaSuccess"; }
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidValue: return "invalid argument";
    default: return "error of the dry device";
    }
}

/* --- Streams and events: handles alone, since everything is complete at once --- */

static void *new_handle(void) {
    static size_t last = 0x1000;
    return (void *)__sync_add_and_fetch(&last, 16);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = new_handle();
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { *stream = new_handle(); return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { *stream = new_handle(); return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { count(&dry_counters->stream_waits); return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *number) {
    if (status)
        *status = cudaStreamCaptureStatusNone;
    if (number)
        *number = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *argument, unsigned flags) {
    call(stream, cudaSuccess, argument);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *argument) { call(argument); return cudaSuccess; }

/* An event is the host's time, in ms, at which it was recorded. */
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(double));
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *(double *)event = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { count(&dry_counters->event_waits); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = (float)(*(double *)end - *(double *)start);
    return cudaSuccess;
}

/* --- Kernels --- */

static cudaError_t launch(dim3 grid, dim3 block, size_t shared_memory) {
    count(&dry_counters->kernels);
    int no_threads = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
    if (no_threads || (size_t)block.x * block.y * block.z > 1024 || block.z > 64 || grid.y > 65535 || grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    return shared_memory > (size_t)dry_shared_memory_limit() ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_memory,
                             cudaStream_t stream) {
    return launch(grid, block, shared_memory);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return launch(config->gridDim, config->blockDim, config->dynamicSmemBytes);
}
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_memory, cudaStream_t stream) {
    return launch(grid, block, shared_memory);
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return cudaSuccess; }

/* <<<grid, block, shared_memory, stream>>> pushes its configuration, and the function's stub pops it before the launch. */
static __thread struct { dim3 grid, block; size_t shared_memory; void *stream; } pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_memory, void *stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared_memory = shared_memory;
    pushed.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_memory, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared_memory = pushed.shared_memory;
    *(void **)stream = pushed.stream;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 64;
    attributes->ptxVersion = attributes->binaryVersion = dry_capability();
    attributes->maxDynamicSharedSizeBytes = dry_shared_memory_limit();
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    int too_much = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > dry_shared_memory_limit();
    return too_much ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared_memory, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared_memory) {
    *blocks = 2;
    return cudaSuccess;
}

/* torch's own function, which asks NVML whether devices of several hosts share memory: there is no such device here */
int _ZN3c104cuda17get_fabric_accessEa(signed char device) { return 0; }

static int does_nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    void *known = dlsym(RTLD_DEFAULT, name);
    *function = known ? known : (void *)does_nothing;
    if (result)
        *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
