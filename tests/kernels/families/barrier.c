/* The pool's barrier where threads come late: nobody passes early, nobody sleeps forever, and who
 * waits for long takes no processor time.
 *
 *   barrier THREADS ROUNDS LATE_MS
 *
 * Prints how many microseconds of processor time the others took while one came LATE_MS late. */
#define _POSIX_C_SOURCE 200809L

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "pool.h"

enum { BARRIERS = 8 };

typedef struct {
    llmrt_pool *pool;
    int num_threads;
    unsigned round;
    long late_ms;
    atomic_int num_come[BARRIERS];
    atomic_int num_wrong;
    atomic_long waited_us;
} state;

static void pause_ns(long ns) {
    nanosleep(&(struct timespec){ns / 1000000000, ns % 1000000000}, NULL);
}

static long cpu_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (long)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* From at once to later than the others stay awake, another for each thread, barrier and round. */
static void come_late(unsigned seed) {
    unsigned mixed = (seed * 2654435761u) >> 24;
    if (mixed < 16) pause_ns(mixed * 200000L);
}

static void meet(void *context, int thread) {
    state *s = context;
    for (int i = 0; i < BARRIERS; i++) {
        come_late((s->round * BARRIERS + (unsigned)i) * 16 + (unsigned)thread);
        atomic_fetch_add(&s->num_come[i], 1);
        llmrt_pool_barrier(s->pool);
        if (atomic_load(&s->num_come[i]) != s->num_threads) atomic_fetch_add(&s->num_wrong, 1);
    }
}

static void wait_for_last(void *context, int thread) {
    state *s = context;
    if (thread == s->num_threads - 1) pause_ns(s->late_ms * 1000000L);
    long before = cpu_us();
    llmrt_pool_barrier(s->pool);
    if (thread != s->num_threads - 1) atomic_fetch_add(&s->waited_us, cpu_us() - before);
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    state s = {.num_threads = atoi(argv[1]), .late_ms = atol(argv[3])};
    s.pool = llmrt_pool_new(s.num_threads);
    if (!s.pool) return 3;
    unsigned num_rounds = (unsigned)atol(argv[2]);
    for (s.round = 0; s.round < num_rounds; s.round++) {
        for (int i = 0; i < BARRIERS; i++) atomic_store(&s.num_come[i], 0);
        llmrt_pool_run(s.pool, s.num_threads, meet, &s);
    }
    llmrt_pool_run(s.pool, s.num_threads, wait_for_last, &s);
    llmrt_pool_free(s.pool);
    printf("%ld\n", atomic_load(&s.waited_us));
    return atomic_load(&s.num_wrong) != 0;
}
