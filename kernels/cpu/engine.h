/* What step.c sets up for a step and the families compute with. */
#ifndef LLMRT_ENGINE_H
#define LLMRT_ENGINE_H

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "abi.h"
#include "format.h"
#include "pool.h"

/* Loops over registers must be unrolled, whatever the compiler thinks of it. */
#define UNROLL _Pragma("GCC unroll 8")

/* The families' code is small functions that must vanish; plain C is left to the compiler. */
#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

enum {
    PRIVATE_TOKENS = 2, /* up to so many, each thread prepares inputs for itself */
    SPLIT_TOKENS = 4,   /* rows of up to so many tokens have their segments computed apart */
    MAX_TILE_TOKENS = 32,
    MAX_TILE_ROWS = 64 /* query rows (token, head) of an attention tile */
};

/* Inputs of a product, ready for it: [tokens][columns]. The integer formats take
 * x = q * scale per group of 32, the float formats x itself. */
typedef struct {
    int8_t *q;
    int32_t *sum; /* of q over a group */
    float *scale;
    float *scaled_sum; /* scale * sum */
    float *x;
} prepared;

/* Positions of a row that lie in one block; each has its KV stored by one thread. */
typedef struct {
    int32_t row, token, num_tokens; /* token: index in the step */
    uint32_t block;
} span;

/* Tokens of a row whose attention is computed together. */
typedef struct {
    int32_t row, token, num_tokens;
    int32_t num_segments; /* computed apart and merged by the last to end, if more than 1 */
    int64_t first_partial;
} tile;

typedef struct {
    int32_t tile, segment;
} unit; /* segment -1: all of them, one after the other */

/* Products of one token with the rows of a strip. */
typedef float strip_result[LLMRT_STRIP];

struct llmrt_family;

struct llmrt_engine {
    const llmrt_program *program;
    const struct llmrt_family *family;
    llmrt_pool *pool;
    int max_threads;
    int num_threads;       /* that compute the step */

    /* set up for the largest step so far */
    int64_t token_capacity;
    float **buffers;       /* [num_buffers], each [M][width] */
    float **angles;        /* [num_ropes], each [M][rotary_dim]: all cos, then all sin */
    prepared shared;
    prepared *own;         /* [max_threads], for PRIVATE_TOKENS */
    float **scratch;       /* [max_threads] */
    int64_t *positions;    /* [M] */
    int64_t *wanted;       /* [logits]: tokens whose logits are wanted */
    void *arrays;          /* of the above */

    /* of this step */
    const llmrt_batch *batch;
    int64_t num_tokens, num_wanted, num_spans, num_tiles, num_units;
    int64_t head_parts;    /* units per group of heads that share a KV head: 1 or all its heads */
    span *spans;
    tile *tiles;
    unit *units;
    float *partials;
    atomic_int *merges;    /* [tiles * kv heads * head_parts] */
    int64_t span_capacity, tile_capacity, unit_capacity, partial_capacity, merge_capacity;
    atomic_long *work;     /* [2 * num_ops + 2] next piece of each phase */
};

/* One instruction family's code for each kind of op; called by every thread. */
typedef struct llmrt_family {
    const char *name;
    int (*is_supported)(void);
    void (*embed)(llmrt_engine *, const llmrt_op *, atomic_long *work);
    void (*prepare)(llmrt_engine *, const llmrt_op *, int thread, atomic_long *work);
    void (*linear)(llmrt_engine *, const llmrt_op *, int thread, atomic_long *work);
    void (*rope)(llmrt_engine *, const llmrt_op *, atomic_long *work);
    void (*attend)(llmrt_engine *, const llmrt_op *, int thread, atomic_long *work);
    void (*add_norm)(llmrt_engine *, const llmrt_op *, atomic_long *work);
    void (*best)(llmrt_engine *, atomic_long *work);
} llmrt_family;

extern const llmrt_family llmrt_avx512, llmrt_avx2, llmrt_portable;

/* How many tokens a product takes: those whose logits are wanted, for the head. */
INLINE int64_t num_inputs(const llmrt_engine *engine, const llmrt_op *op) {
    return op->out == LLMRT_OUT_LOGITS ? engine->num_wanted : engine->num_tokens;
}
/* Few tokens are prepared by each thread for itself, which saves a barrier. */
INLINE int is_private(int64_t num_tokens) { return num_tokens <= PRIVATE_TOKENS; }

INLINE int64_t kv_element_bytes(int64_t format) {
    return format == LLMRT_KV_F32 ? 4 : format == LLMRT_KV_BF16 ? 2 : 1;
}
INLINE int is_scaled(int64_t format) { return format >= LLMRT_KV_INT8; }

/* Bytes of one layer and KV head of a block: K, V, and the scales of both. */
INLINE int64_t head_bytes(const llmrt_program *program) {
    int64_t elements = 2 * program->head_dim * LLMRT_BLOCK_TOKENS;
    int64_t scales = is_scaled(program->kv_format) ? 2 * LLMRT_BLOCK_TOKENS * 4 : 0;
    return elements * kv_element_bytes(program->kv_format) + scales;
}
INLINE int64_t block_bytes(const llmrt_program *program) {
    return program->num_layers * program->num_kv_heads * head_bytes(program);
}
INLINE uint8_t *head_of_block(const llmrt_program *program, const llmrt_row *row, int64_t block,
                              int64_t layer, int64_t head) {
    return row->arena + block * block_bytes(program) +
           (layer * program->num_kv_heads + head) * head_bytes(program);
}

/* Floats of a partial result of attention: per query row D sums, the maximum, the weight. */
INLINE int64_t partial_floats(const llmrt_program *program) { return program->head_dim + 2; }

/* Floats that a thread needs for a tile: queries, two sums, scores, and a block widened. */
INLINE int64_t attention_floats(int64_t head_dim) {
    return 3 * MAX_TILE_ROWS * head_dim + MAX_TILE_ROWS * LLMRT_BLOCK_TOKENS +
           2 * LLMRT_BLOCK_TOKENS * head_dim;
}

/* The next `size` pieces of work from `work`, or a start at or beyond the end. */
INLINE int64_t take(atomic_long *work, int64_t size) {
    return atomic_fetch_add_explicit(work, size, memory_order_relaxed);
}
/* Pieces to take at once, so that threads end together and rarely meet. */
INLINE int64_t piece(int64_t total, int num_threads) {
    int64_t size = total / (num_threads * 8);
    return num_threads == 1 ? total : size < 1 ? 1 : size;
}

#endif
