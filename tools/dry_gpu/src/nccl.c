/* NCCL between the processes of this machine, with real values: every message is a file in /dev/shm, which belongs to
 * one start of dry-gpu alone and disappears with it. Collectives run at once on the calling thread; receives inside a
 * group run at its end. Sums are computed in double precision and rounded once. */
#define _GNU_SOURCE
#include "dry_device.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_USAGE = 5, ID_BYTES = 128, NAME_BYTES = 40, MESSAGE_BYTES = 120, PATH_BYTES = 140, WAIT_US = 200 };
enum type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum operation { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };  /* nccl.h, ncclRedOp_t */

struct communicator {
    char name[NAME_BYTES];
    int rank, size, process;
    long collectives, splits;   /* numbers of the next ones */
    const char *last;           /* function of the collective before */
    long *sent, *received;      /* by peer */
    struct communicator *next;  /* of this process */
};
static struct communicator *communicators;
typedef struct { char bytes[ID_BYTES]; } unique_id;

static size_t size_of(enum type type) {
    switch (type) {
    case INT8: case UINT8: case FLOAT8_E4M3: case FLOAT8_E5M2: return 1;
    case FLOAT16: case BFLOAT16: return 2;
    case INT64: case UINT64: case FLOAT64: return 8;
    default: return 4;
    }
}

/* --- Messages --- */

static void post(const char *name, const void *from, size_t size) {
    if (!dry_has_values(size))  /* the size alone is sent */
        from = &size;
    size_t sent = from == &size ? sizeof size : size;
    char unfinished[PATH_BYTES], path[PATH_BYTES];
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    snprintf(unfinished, sizeof unfinished, "/dev/shm/%s.tmp", name);
    FILE *file = fopen(unfinished, "wb");
    if (!file || fwrite(from, 1, sent, file) != sent || fclose(file) || rename(unfinished, path)) {
        perror("dry NCCL: a message cannot be written to /dev/shm");
        abort();
    }
}

/* Wait a moment. A GPU would wait for ever for what another rank never does; here DRY_GPU_TIMEOUT (300 s) ends it. */
static void wait_longer(long waited_us, const char *name, const char *what) {
    const char *limit_s = getenv("DRY_GPU_TIMEOUT");
    if (waited_us > 1000000L * (limit_s ? atol(limit_s) : 300)) {
        fprintf(stderr, "dry NCCL: %s was never %s\n", name, what);
        abort();
    }
    usleep(WAIT_US);
}

static void take(const char *name, void *to, size_t size) {
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    FILE *file;
    for (long waited = 0; !(file = fopen(path, "rb")); waited += WAIT_US)
        wait_longer(waited, name, "sent");
    size_t sent = size, got = dry_has_values(size) ? fread(to, 1, size, file) : 0;
    int complete = got == size || fread(&sent, sizeof sent, 1, file) == 1, longer = fgetc(file) != EOF;
    fclose(file);
    if (!complete || sent != size || longer) {  /* a GPU would hang, or write beyond the tensor */
        fprintf(stderr, "dry NCCL: %s: the ranks differ in the size of a message; this one expects %zu bytes\n", name, size);
        abort();
    }
}

static void remove_message(const char *name) {
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    unlink(path);
}

/* Every rank gives `size` bytes, and gets those of all ranks, in the order of the ranks. The caller frees them. Returns
 * NULL if they have no values (dry_has_values). The name of a message has the function that sends it, so that ranks that
 * call different ones wait for each other. */
#define exchange(group, mine, size) exchange_for(__func__ + 4, group, mine, size)
static char *exchange_for(const char *function, struct communicator *group, const void *mine, size_t size) {
    char *all = dry_has_values(size) ? malloc(size * group->size + 1) : NULL, name[MESSAGE_BYTES];
    if (all)
        memcpy(all + size * group->rank, mine, size);
    if (group->size == 1)
        return all;
    snprintf(name, sizeof name, "dry_%s_%ld_%d_%s", group->name, group->collectives, group->rank, function);
    post(name, mine, size);
    for (int rank = 0; rank < group->size; rank++) {
        snprintf(name, sizeof name, "dry_%s_%ld_%d_%s", group->name, group->collectives, rank, function);
        if (rank != group->rank)
            take(name, all ? all + size * rank : NULL, size);
    }
    /* all ranks have sent this message, so all have read the one before */
    snprintf(name, sizeof name, "dry_%s_%ld_%d_%s", group->name, group->collectives - 1, group->rank, group->last);
    remove_message(name);
    group->collectives++;
    group->last = function;
    return all;
}

/* --- Numbers --- */

static double from_float16(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                  : exponent     ? ldexp(1 + mantissa / 1024.0, exponent - 15)
                                 : ldexp(mantissa / 1024.0, -14);
    return bits & 0x8000 ? -size : size;
}

static uint16_t to_float16(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double size = fabs(value);
    if (isnan(value))
        return 0x7e00;
    if (size >= 65520)
        return sign | 0x7c00;
    if (size < ldexp(1, -14))
        return sign | (uint16_t)nearbyint(ldexp(size, 24));
    int exponent;
    double fraction = frexp(size, &exponent);  /* size = fraction * 2^exponent, 0.5 <= fraction < 1 */
    return sign | (uint16_t)(((exponent + 14) << 10) + (int)nearbyint((2 * fraction - 1) * 1024));
}

static double from_bfloat16(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static uint16_t to_bfloat16(double value) {
    float single = value;
    uint32_t word;
    memcpy(&word, &single, 4);
    return isnan(value) ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

static double number_at(const void *numbers, size_t i, enum type type) {
    switch (type) {
    case INT8: return ((int8_t *)numbers)[i];
    case UINT8: return ((uint8_t *)numbers)[i];
    case INT32: return ((int32_t *)numbers)[i];
    case UINT32: return ((uint32_t *)numbers)[i];
    case INT64: return ((int64_t *)numbers)[i];
    case UINT64: return ((uint64_t *)numbers)[i];
    case FLOAT16: return from_float16(((uint16_t *)numbers)[i]);
    case FLOAT32: return ((float *)numbers)[i];
    case FLOAT64: return ((double *)numbers)[i];
    case BFLOAT16: return from_bfloat16(((uint16_t *)numbers)[i]);
    default: return 0;  /* NCCL copies FP8 here, and adds none */
    }
}

static void set_number(void *numbers, size_t i, enum type type, double value) {
    switch (type) {
    case INT8: ((int8_t *)numbers)[i] = value; break;
    case UINT8: ((uint8_t *)numbers)[i] = value; break;
    case INT32: ((int32_t *)numbers)[i] = value; break;
    case UINT32: ((uint32_t *)numbers)[i] = value; break;
    case INT64: ((int64_t *)numbers)[i] = value; break;
    case UINT64: ((uint64_t *)numbers)[i] = value; break;
    case FLOAT16: ((uint16_t *)numbers)[i] = to_float16(value); break;
    case FLOAT32: ((float *)numbers)[i] = value; break;
    case FLOAT64: ((double *)numbers)[i] = value; break;
    case BFLOAT16: ((uint16_t *)numbers)[i] = to_bfloat16(value); break;
    default: break;
    }
}

static double combined(double left, double right, enum operation operation) {
    switch (operation) {
    case PRODUCT: return left * right;
    case MAXIMUM: return left > right ? left : right;
    case MINIMUM: return left < right ? left : right;
    default: return left + right;
    }
}

/* Reduce `number` values of each rank, which begin `offset` bytes into the rank's `stride` bytes of `all`. */
static void reduce(void *result, const char *all, int ranks, size_t stride, size_t offset, size_t number, enum type type,
                   enum operation operation) {
    for (size_t i = 0; all && i < number; i++) {
        double value = number_at(all + offset, i, type);
        for (int rank = 1; rank < ranks; rank++)
            value = combined(value, number_at(all + stride * rank + offset, i, type), operation);
        set_number(result, i, type, operation == AVERAGE ? value / ranks : value);
    }
}

/* --- Communicators --- */

static int new_communicator(void **result, const char *name, int size, int rank) {
    struct communicator *group = calloc(1, sizeof *group);
    snprintf(group->name, sizeof group->name, "%s", name);
    group->rank = rank;
    group->size = size;
    group->last = "";
    group->process = getpid();
    group->next = communicators;
    communicators = group;
    group->sent = calloc(size, sizeof(long));
    group->received = calloc(size, sizeof(long));
    *result = group;
    return SUCCESS;
}

int ncclGetVersion(int *version) { *version = 22907; return SUCCESS; }
const char *ncclGetErrorString(int error) { return error ? "error of the dry device" : "no error"; }
const char *ncclGetLastError(void *group) { return "Duplicate GPU detected: two ranks use the same device"; }
int ncclGetUniqueId(unique_id *id) {
    unsigned char random[16];
    FILE *file = fopen("/dev/urandom", "rb");
    if (!file || fread(random, 1, sizeof random, file) != sizeof random)
        abort();
    fclose(file);
    memset(id, 0, sizeof *id);
    for (int i = 0; i < 16; i++)
        sprintf(id->bytes + 2 * i, "%02x", random[i]);
    return SUCCESS;
}
/* As NCCL, this rejects ranks that share a device. */
static int init(void **group, const char *name, int size, int rank) {
    new_communicator(group, name, size, rank);
    int device = dry_host_device(), shared = 0;
    int *all = (int *)exchange((struct communicator *)*group, &device, sizeof device);
    for (int other = 0; other < size; other++)
        shared += other != rank && all[other] == device;
    free(all);
    return shared ? INVALID_USAGE : SUCCESS;
}
int ncclCommInitRank(void **group, int size, unique_id id, int rank) { return init(group, id.bytes, size, rank); }
int ncclCommInitRankConfig(void **group, int size, unique_id id, int rank, void *config) { return init(group, id.bytes, size, rank); }
int ncclCommInitRankScalable(void **group, int size, int rank, int number, unique_id *ids, void *config) {
    return init(group, ids->bytes, size, rank);
}
int ncclCommSplit(void *parent, int color, int key, void **result, void *config) {
    struct communicator *group = parent;
    int mine[2] = {color, key}, size = 0, rank = 0;
    int *all = (int *)exchange(group, mine, sizeof mine);
    for (int i = 0; i < group->size; i++) {
        int other_color = all[2 * i], other_key = all[2 * i + 1];
        size += other_color == color;
        rank += other_color == color && (other_key < key || (other_key == key && i < group->rank));
    }
    free(all);
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "%.20ss%ldc%d", group->name, group->splits++, color);
    *result = NULL;
    return color < 0 ? SUCCESS : new_communicator(result, name, size, rank);
}
int ncclCommDestroy(void *group) { return SUCCESS; }  /* it is kept: see complain_of_lost_messages */
int ncclCommAbort(void *group) { return SUCCESS; }
int ncclCommCount(void *group, int *size) { *size = ((struct communicator *)group)->size; return SUCCESS; }
int ncclCommUserRank(void *group, int *rank) { *rank = ((struct communicator *)group)->rank; return SUCCESS; }
int ncclCommGetAsyncError(void *group, int *error) { *error = SUCCESS; return SUCCESS; }
int ncclCommRegister(void *group, void *buffer, size_t size, void **handle) { *handle = buffer; return SUCCESS; }
int ncclMemAlloc(void **start, size_t size) { return cudaMalloc(start, size); }
int ncclMemFree(void *start) { return cudaFree(start); }
int ncclRedOpCreatePreMulSum(int *operation, void *factor, int type, int residence, void *group) { *operation = SUM; return SUCCESS; }

/* --- Sends and receives --- */

struct receive { struct communicator *group; void *to; size_t size; int peer; };
static __thread int depth, waiting, space;
static __thread struct receive *receives;

static void name_message(char *name, struct communicator *group, int from, int to, long number) {
    snprintf(name, MESSAGE_BYTES, "dry_%s_p_%d_%d_%ld", group->name, from, to, number);
}
static int is_waiting(const char *name) {
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    return !access(path, F_OK);
}

/* A rank that ends, and has sent what nobody received, would hang on a GPU. */
__attribute__((destructor)) static void complain_of_lost_messages(void) {
    char name[MESSAGE_BYTES];
    for (struct communicator *group = communicators; group; group = group->next)
        for (int peer = 0; peer < group->size && group->process == getpid(); peer++) {
            name_message(name, group, group->rank, peer, group->sent[peer] - 1);
            for (long waited = 0; group->sent[peer] && is_waiting(name); waited += WAIT_US)
                wait_longer(waited, name, "received");
        }
}
void _exit(int status) {  /* ranks end by it, without destructors */
    if (!status)
        complain_of_lost_messages();
    syscall(SYS_exit_group, status);
    __builtin_unreachable();
}

static void receive_now(struct receive receive) {
    struct communicator *group = receive.group;
    char name[MESSAGE_BYTES];
    name_message(name, group, receive.peer, group->rank, group->received[receive.peer]++);
    take(name, receive.to, receive.size);
    remove_message(name);
}
int ncclGroupStart(void) { depth++; return SUCCESS; }
int ncclGroupEnd(void) {
    if (--depth == 0) {
        for (int i = 0; i < waiting; i++)
            receive_now(receives[i]);
        waiting = 0;
    }
    return SUCCESS;
}
int ncclSend(const void *from, size_t number, int type, int peer, void *parent, void *stream) {
    struct communicator *group = parent;
    char name[MESSAGE_BYTES];
    name_message(name, group, group->rank, peer, group->sent[peer]++);
    post(name, from, number * size_of(type));
    return SUCCESS;
}
int ncclRecv(void *to, size_t number, int type, int peer, void *group, void *stream) {
    struct receive receive = {group, to, number * size_of(type), peer};
    if (!depth) {
        receive_now(receive);
        return SUCCESS;
    }
    if (waiting == space) {
        space = space ? 2 * space : 64;
        receives = realloc(receives, space * sizeof *receives);
    }
    receives[waiting++] = receive;
    return SUCCESS;
}

/* --- Collectives: exchange the tensors of all ranks, then keep what this rank is to have --- */

int ncclAllReduce(const void *from, void *to, size_t number, int type, int operation, void *parent, void *stream) {
    struct communicator *group = parent;
    size_t size = number * size_of(type);
    char *all = exchange(group, from, size);
    if (all && group->size == 1)
        memmove(to, from, size);
    else
        reduce(to, all, group->size, size, 0, number, type, operation);
    free(all);
    return SUCCESS;
}
int ncclReduce(const void *from, void *to, size_t number, int type, int operation, int root, void *parent, void *stream) {
    struct communicator *group = parent;
    size_t size = number * size_of(type);
    char *all = exchange(group, from, size);
    if (group->rank == root)
        reduce(to, all, group->size, size, 0, number, type, operation);
    free(all);
    return SUCCESS;
}
int ncclReduceScatter(const void *from, void *to, size_t number, int type, int operation, void *parent, void *stream) {
    struct communicator *group = parent;
    size_t part = number * size_of(type);
    char *all = exchange(group, from, part * group->size);
    reduce(to, all, group->size, part * group->size, part * group->rank, number, type, operation);
    free(all);
    return SUCCESS;
}
int ncclBroadcast(const void *from, void *to, size_t number, int type, int root, void *parent, void *stream) {
    struct communicator *group = parent;
    size_t size = number * size_of(type);
    char *all = exchange(group, group->rank == root ? from : to, size);
    if (all)
        memcpy(to, all + size * root, size);
    free(all);
    return SUCCESS;
}
int ncclBcast(void *buffer, size_t number, int type, int root, void *group, void *stream) {
    return ncclBroadcast(buffer, buffer, number, type, root, group, stream);
}
int ncclAllGather(const void *from, void *to, size_t number, int type, void *parent, void *stream) {
    struct communicator *group = parent;
    size_t size = number * size_of(type);
    char *all = exchange(group, from, size);
    if (all)
        memcpy(to, all, size * group->size);
    free(all);
    return SUCCESS;
}
int ncclAlltoAll(const void *from, void *to, size_t number, int type, void *parent, void *stream) {
    struct communicator *group = parent;
    size_t part = number * size_of(type), size = part * group->size;
    char *all = exchange(group, from, size);
    for (int rank = 0; all && rank < group->size; rank++)
        memcpy((char *)to + part * rank, all + size * rank + part * group->rank, part);
    free(all);
    return SUCCESS;
}
