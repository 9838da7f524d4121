/* What the parts of the dry device share: its shape, its memory, and the counts of what a GPU would have done. */
#ifndef DRY_DEVICE_H
#define DRY_DEVICE_H

#include <cuda_runtime_api.h>
#include <stddef.h>

enum { MAX_DEVICES = 64 };

/* The devices that the environment asks for; those of a process are numbered from 0. */
int dry_device_count(void);          /* DRY_GPU_COUNT, 1; fewer with CUDA_VISIBLE_DEVICES */
int dry_capability(void);            /* DRY_GPU_CAPABILITY, 80 for compute capability 8.0 */
size_t dry_capacity(void);           /* DRY_GPU_MEMORY in GiB, 80; in bytes; of the current device */
int dry_shared_memory_limit(void);   /* bytes that one block may use */
int dry_current_device(void);
int dry_host_device(void);           /* number of the current device on the host */
int dry_has_fault(const char *name); /* DRY_GPU_FAULT: old_driver, no_permission, busy, full */

enum memory_kind { PAGEABLE = -1, DEVICE = 0, PINNED = 1, REGISTERED = 2 };

struct range {
    char *start;
    size_t size;
    enum memory_kind kind;
    int device;
};

/* Return whether a copy of this size has values. With torch's caching allocator (DRY_GPU_CACHING) only memory is
 * measured: copies to a device and messages of more than 1 MiB, for which that allocator has blocks of their own, are
 * left out, so that a model takes no memory of the host. */
int dry_has_values(size_t size);

/* Return the range that an address lies in; its kind is PAGEABLE where it lies in none. */
struct range dry_find_range(const void *address);

/* Order of DRY_GPU_COUNTERS: 8 integers of 64 bits. The last one counts copies that the host waits for because the memory
 * of the host is not pinned, although they were to be asynchronous. */
struct counters {
    long kernels, device_waits, stream_waits, event_waits, copies_to_host, bytes_to_host, copies_to_device, pageable_copies;
};
extern struct counters *dry_counters;

#endif
