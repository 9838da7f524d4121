/* Device and pinned memory: pages of the host that are zero until somebody writes them. Copies are real. */
#define _GNU_SOURCE
#include "dry_device.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static struct range *ranges;
static int number, space;
static size_t used[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* What is left of the current device; with the fault "full", other programs hold all but 1 GiB of it. */
static size_t free_bytes(void) {
    size_t all = dry_has_fault("full") ? (size_t)1 << 30 : dry_capacity();
    return all - used[dry_current_device()];
}

static void add_range(void *start, size_t size, enum memory_kind kind) {
    pthread_mutex_lock(&lock);
    if (number == space) {
        space = space ? 2 * space : 1024;
        ranges = realloc(ranges, space * sizeof *ranges);
    }
    ranges[number++] = (struct range){start, size, kind, dry_current_device()};
    pthread_mutex_unlock(&lock);
}

static struct range remove_range(void *start) {
    struct range found = {.kind = PAGEABLE};
    pthread_mutex_lock(&lock);
    for (int i = number - 1; i >= 0; i--)  /* what was allocated last is often freed first */
        if (ranges[i].start == start) {
            found = ranges[i];
            ranges[i] = ranges[--number];
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

struct range dry_find_range(const void *address) {
    struct range found = {.kind = PAGEABLE};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < number; i++)
        if ((char *)address >= ranges[i].start && (char *)address < ranges[i].start + ranges[i].size) {
            found = ranges[i];
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Take memory of a device, or give it back. Returns whether there was enough. */
static int take(int device, size_t size) {
    if (__atomic_add_fetch(&used[device], size, __ATOMIC_RELAXED) <= dry_capacity())
        return 1;
    __atomic_sub_fetch(&used[device], size, __ATOMIC_RELAXED);
    return 0;
}
static void give_back(int device, size_t size) { __atomic_sub_fetch(&used[device], size, __ATOMIC_RELAXED); }

static void *new_pages(size_t size) {
    return mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static cudaError_t allocate(void **start, size_t size, enum memory_kind kind) {
    if (dry_has_fault("busy"))
        return cudaErrorDevicesUnavailable;
    if (kind == DEVICE && (size > free_bytes() || !take(dry_current_device(), size)))
        return cudaErrorMemoryAllocation;
    void *pages = new_pages(size);
    if (pages == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    add_range(pages, size, kind);
    *start = pages;
    return cudaSuccess;
}

static cudaError_t release(void *start) {
    struct range removed = remove_range(start);
    if (start && removed.kind == PAGEABLE)
        return cudaErrorInvalidValue;
    if (start)
        munmap(start, removed.size ? removed.size : 1);
    if (removed.kind == DEVICE)
        give_back(removed.device, removed.size);
    return cudaSuccess;
}

/* The driver's virtual memory, of which torch makes expandable segments: a handle is the size of its memory. */
int cuMemAddressReserve(void **start, size_t size, size_t alignment, void *wanted, unsigned long long flags) {
    *start = new_pages(size);
    if (*start == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    add_range(*start, size, DEVICE);
    return 0;
}
int cuMemAddressFree(void *start, size_t size) { remove_range(start); return munmap(start, size); }
int cuMemCreate(size_t *handle, size_t size, const void *properties, unsigned long long flags) {
    *handle = size;
    return take(dry_current_device(), size) ? 0 : cudaErrorMemoryAllocation;
}
int cuMemRelease(size_t handle) { give_back(dry_current_device(), handle); return 0; }
int cuMemUnmap(void *start, size_t size) { return madvise(start, size, MADV_DONTNEED); }

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = dry_capacity();
    *available = free_bytes();
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **start, size_t size) { return allocate(start, size, DEVICE); }
cudaError_t cudaFree(void *start) { return release(start); }
cudaError_t cudaMallocAsync(void **start, size_t size, cudaStream_t stream) { return allocate(start, size, DEVICE); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return release(start); }
cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) { return allocate(start, size, PINNED); }
cudaError_t cudaFreeHost(void *start) { return release(start); }
cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) { add_range(start, size, REGISTERED); return cudaSuccess; }
cudaError_t cudaHostUnregister(void *start) { remove_range(start); return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void **device_address, void *address, unsigned flags) {
    *device_address = address;
    return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *start) { memset(handle, 0, sizeof *handle); return cudaSuccess; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    struct range range = dry_find_range(address);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = range.kind == DEVICE     ? cudaMemoryTypeDevice
                       : range.kind == PAGEABLE ? cudaMemoryTypeUnregistered
                                                : cudaMemoryTypeHost;
    attributes->device = range.device;
    attributes->devicePointer = range.kind == PAGEABLE ? NULL : (void *)address;
    attributes->hostPointer = range.kind == PINNED || range.kind == REGISTERED ? (void *)address : NULL;
    return cudaSuccess;
}

int dry_has_values(size_t size) { return size <= 1 << 20 || getenv("PYTORCH_NO_CUDA_MEMORY_CACHING"); }

static cudaError_t set(void *start, int value, size_t size) {
    if (dry_has_values(size))
        memset(start, value, size);
    return cudaSuccess;
}

/* Return whether a value that the host reads is a flag, or fp32 and not finite: no kernel wrote it, and the caching
 * allocator's block has old bytes. The run would skip its update. */
static int is_old(const void *value, size_t size) {
    const uint32_t infinity = 0x7f800000;
    return size < sizeof infinity || (size == sizeof infinity && (*(const uint32_t *)value & infinity) == infinity);
}

static cudaError_t copy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    if (kind == cudaMemcpyDeviceToHost) {
        __atomic_add_fetch(&dry_counters->copies_to_host, 1, __ATOMIC_RELAXED);
        __atomic_add_fetch(&dry_counters->bytes_to_host, size, __ATOMIC_RELAXED);
    }
    if (kind == cudaMemcpyHostToDevice)
        __atomic_add_fetch(&dry_counters->copies_to_device, 1, __ATOMIC_RELAXED);
    if (kind == cudaMemcpyDeviceToHost && !dry_has_values(SIZE_MAX) && is_old(from, size))
        memset(to, 0, size);
    else if (dry_has_values(size) || dry_find_range(to).kind != DEVICE)  /* the host gets zeros, or finds old bytes */
        memmove(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { return copy(to, from, size, kind); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    int pageable = (kind == cudaMemcpyHostToDevice && dry_find_range(from).kind == PAGEABLE) ||
                   (kind == cudaMemcpyDeviceToHost && dry_find_range(to).kind == PAGEABLE);
    __atomic_add_fetch(&dry_counters->pageable_copies, pageable, __ATOMIC_RELAXED);
    return copy(to, from, size, kind);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int peer, size_t size, cudaStream_t stream) {
    return copy(to, from, size, cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemset(void *start, int value, size_t size) { return set(start, value, size); }
cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) { return set(start, value, size); }
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char symbols[65536];
    *address = symbols;
    return cudaSuccess;
}
