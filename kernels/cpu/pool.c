#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

/* Between steps a few hundred microseconds pass; a sleeping thread takes some 50 us to come. */
enum { SPINS_BEFORE_SLEEP = 20000 };
/* At a barrier a thread is late by microseconds, unless it lost its core: then waiting is left to
 * the kernel. Yields come first, as the late one may want this core. */
enum { BARRIER_SPINS = 2000, BARRIER_YIELDS = 1000 };
enum { MAX_THREADS = (1 << 16) - 1 };

struct llmrt_pool {
    int num_threads;
    pid_t process; /* that has the threads: a fork leaves them behind */
    pthread_t *threads;
    void (*body)(void *, int);
    void *context;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int is_closing;
    int num_running; /* threads of the current round */
    /* Number of the round, and in its lowest bits how many threads run it: read in one piece, since
     * a thread that is not among them may come when the next round has begun. */
    _Alignas(64) _Atomic uint64_t round;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_uint phase; /* of the barrier */
    atomic_int num_asleep; /* at it */
    pthread_mutex_t barrier_mutex;
    pthread_cond_t barrier_wake;
};

typedef struct {
    llmrt_pool *pool;
    int thread;
} start;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int is_over(llmrt_pool *pool, unsigned phase) {
    return atomic_load_explicit(&pool->phase, memory_order_acquire) != phase;
}

/* Either this thread sees the new phase, or the one that begins it sees this one asleep: both write
 * before they read, in one order for all. */
static void sleep_until_over(llmrt_pool *pool, unsigned phase) {
    pthread_mutex_lock(&pool->barrier_mutex);
    atomic_fetch_add(&pool->num_asleep, 1);
    while (atomic_load(&pool->phase) == phase)
        pthread_cond_wait(&pool->barrier_wake, &pool->barrier_mutex);
    atomic_fetch_sub(&pool->num_asleep, 1);
    pthread_mutex_unlock(&pool->barrier_mutex);
}

static void begin_phase(llmrt_pool *pool) {
    atomic_fetch_add(&pool->phase, 1);
    if (atomic_load(&pool->num_asleep) == 0) return;
    pthread_mutex_lock(&pool->barrier_mutex);
    pthread_cond_broadcast(&pool->barrier_wake);
    pthread_mutex_unlock(&pool->barrier_mutex);
}

void llmrt_pool_barrier(llmrt_pool *pool) {
    int num_running = pool->num_running; /* before it is known that this thread has come */
    if (num_running == 1) return;
    unsigned phase = atomic_load_explicit(&pool->phase, memory_order_acquire);
    if (atomic_fetch_add(&pool->arrived, 1) == num_running - 1) {
        atomic_store(&pool->arrived, 0);
        begin_phase(pool);
        return;
    }
    for (int i = 0; i < BARRIER_SPINS; i++) {
        if (is_over(pool, phase)) return;
        relax();
    }
    for (int i = 0; i < BARRIER_YIELDS; i++) {
        if (is_over(pool, phase)) return;
        sched_yield();
    }
    sleep_until_over(pool, phase);
}

static int takes_part(uint64_t round, int thread) {
    return thread < (int)(round & MAX_THREADS);
}

/* The next round after `seen` that `thread` takes part in; sleeps if it does not come soon. */
static uint64_t await_round(llmrt_pool *pool, uint64_t seen, int thread) {
    uint64_t round;
    for (int i = 0; i < SPINS_BEFORE_SLEEP; i++) {
        round = atomic_load_explicit(&pool->round, memory_order_acquire);
        if (round != seen) {
            if (takes_part(round, thread)) return round;
            break;
        }
        relax();
    }
    pthread_mutex_lock(&pool->mutex);
    while ((round = atomic_load(&pool->round)) == seen || !takes_part(round, thread))
        pthread_cond_wait(&pool->wake, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
    return round;
}

static void start_round(llmrt_pool *pool, int num_threads) {
    pthread_mutex_lock(&pool->mutex);
    uint64_t number = atomic_load(&pool->round) / (MAX_THREADS + 1) + 1;
    atomic_store(&pool->round, number * (MAX_THREADS + 1) + (unsigned)num_threads);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

static void *run_thread(void *argument) {
    start own = *(start *)argument;
    free(argument);
    uint64_t round = 0;
    for (;;) {
        round = await_round(own.pool, round, own.thread);
        if (own.pool->is_closing) return NULL;
        own.pool->body(own.pool->context, own.thread);
        llmrt_pool_barrier(own.pool);
    }
}

llmrt_pool *llmrt_pool_new(int num_threads) {
    llmrt_pool *pool = num_threads < 1 || num_threads > MAX_THREADS ? NULL : aligned_alloc(64, sizeof *pool);
    if (!pool) return NULL;
    *pool = (llmrt_pool){.num_threads = 1, .process = getpid()};
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_mutex_init(&pool->barrier_mutex, NULL);
    pthread_cond_init(&pool->barrier_wake, NULL);
    pool->threads = calloc((size_t)num_threads, sizeof *pool->threads);
    while (pool->threads && pool->num_threads < num_threads) {
        start *own = malloc(sizeof *own);
        if (!own) break;
        *own = (start){pool, pool->num_threads};
        if (pthread_create(&pool->threads[pool->num_threads], NULL, run_thread, own)) {
            free(own);
            break;
        }
        pool->num_threads++;
    }
    if (!pool->threads || pool->num_threads < num_threads) {
        llmrt_pool_free(pool);
        return NULL;
    }
    return pool;
}

void llmrt_pool_free(llmrt_pool *pool) {
    if (!pool) return;
    if (pool->process == getpid()) { /* else both belong to threads that are not here */
        pool->is_closing = 1;
        start_round(pool, pool->num_threads);
        for (int i = 1; i < pool->num_threads; i++) pthread_join(pool->threads[i], NULL);
        pthread_cond_destroy(&pool->barrier_wake);
        pthread_mutex_destroy(&pool->barrier_mutex);
        pthread_cond_destroy(&pool->wake);
        pthread_mutex_destroy(&pool->mutex);
    }
    free(pool->threads);
    free(pool);
}

void llmrt_pool_run(llmrt_pool *pool, int num_threads, void (*body)(void *, int), void *context) {
    if (pool->num_threads > 1 && pool->process != getpid()) pool->num_threads = 1;
    pool->num_running = num_threads < pool->num_threads ? num_threads : pool->num_threads;
    pool->body = body;
    pool->context = context;
    if (pool->num_running > 1) start_round(pool, pool->num_running);
    body(context, 0);
    llmrt_pool_barrier(pool);
}
