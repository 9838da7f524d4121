/* For LD_PRELOAD: after each wake-up, every thread but the main one is delayed by up to two seconds, or until
 * release_late_threads() is called. A busy machine causes such delays at random. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile int released = 1;

void hold_late_threads(void) { released = 0; }

/* Release them, and keep Python's lock (called through ctypes.PyDLL) until they have come to want it. */
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
