/* Threads that run one function together: they spin for a moment between calls, then sleep. */
#ifndef LLMRT_POOL_H
#define LLMRT_POOL_H

typedef struct llmrt_pool llmrt_pool;

/* `num_threads` counts the caller of llmrt_pool_run. NULL if threads cannot be had. */
llmrt_pool *llmrt_pool_new(int num_threads);
void llmrt_pool_free(llmrt_pool *pool);

/* Run body(context, thread) on the first `num_threads` threads; returns when all have returned. The
 * others sleep. */
void llmrt_pool_run(llmrt_pool *pool, int num_threads, void (*body)(void *, int), void *context);

/* Wait within a body until all threads have come here. */
void llmrt_pool_barrier(llmrt_pool *pool);

#endif
