/* Preloaded: the wall clock of this process is off by the seconds that a shared file holds.

   The file named by LLMRT_TEST_CLOCK has three words: the seconds, the number of readings that
   were off by them, and the number of waits for a wall time, which this would not move: a
   process that waits by the wall clock is seen there. All other clocks are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none[3], *words = none;

__attribute__((constructor)) static void attach(void) {
    int fd = open(getenv("LLMRT_TEST_CLOCK"), O_RDWR | O_CLOEXEC);
    void *shared = mmap(NULL, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED) abort();
    close(fd);
    words = shared;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
    if (!failed && is_wall && words[0] != 0) {
        now->tv_sec += words[0];
        __atomic_fetch_add(&words[1], 1, __ATOMIC_RELAXED);
    }
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    *now = (struct timeval){precise.tv_sec, precise.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (seconds) *seconds = precise.tv_sec;
    return precise.tv_sec;
}

/* Since 1970 it is more than a thousand million seconds; since the start of a machine, less. */
static void look_at(const struct timespec *until) {
    if (until->tv_sec > 1000000000) __atomic_fetch_add(&words[2], 1, __ATOMIC_RELAXED);
}

int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until) {
    int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) =
        dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    look_at(until);
    return wait(c, m, until);
}

int sem_timedwait(sem_t *s, const struct timespec *until) {
    int (*wait)(sem_t *, const struct timespec *) = dlsym(RTLD_NEXT, "sem_timedwait");
    look_at(until);
    return wait(s, until);
}
