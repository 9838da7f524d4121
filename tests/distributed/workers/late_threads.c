/* Library for LD_PRELOAD. After hold_late_threads(), every thread except the main one waits after each
 * pthread_cond_broadcast: until release_late_threads(), or for two seconds. A busy machine causes such delays at
 * random. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile int released = 1;

void hold_late_threads(void) { released = 0; }

/* Release the threads, then sleep for 1 s with the GIL held (ctypes.PyDLL keeps the GIL). In this time the threads
 * reach the point where they need the GIL. */
void release_late_threads(void) {
    released = 1;
    usleep(1000000);
}

int pthread_cond_broadcast(pthread_cond_t *condition) {
    int (*real)(pthread_cond_t *) = dlsym(RTLD_NEXT, "pthread_cond_broadcast");
    int result = real(condition);
    if (syscall(SYS_gettid) != getpid())
        for (int waited_ms = 0; !released && waited_ms < 2000; waited_ms++) usleep(1000);
    return result;
}
