/* What Python and the compiled step share. Every struct here has its twin in library.py.
 *
 * A step is one call: a program (a list of ops, compiled once per model) over a batch of rows
 * (any mix of prefill chunks and decodes). Letters: M tokens of the step, D head size.
 *
 * The result of a token does not depend on the batch, the chunking or the number of threads:
 * products are exact int32 inside a group of 32 columns and float32 over groups in order;
 * attention visits blocks of 32 positions in order, in segments at fixed positions.
 */
#ifndef LLMRT_ABI_H
#define LLMRT_ABI_H

#include <stdint.h>

#define LLMRT_ABI 2
#define LLMRT_API __attribute__((visibility("default")))

enum {
    LLMRT_GROUP = 32,        /* columns that share a scale */
    LLMRT_STRIP = 16,        /* rows that are packed together */
    LLMRT_BLOCK_TOKENS = 32, /* positions of a KV block */
    LLMRT_SEGMENT_BLOCKS = 8 /* blocks whose attention is summed before it is merged */
};

/* A weight [rows, columns], packed: strips of 16 rows (the last one filled up with zeros), in a
 * strip group after group of 32 columns. A group of the integer formats holds
 *
 *     q: 8 quads of 4 columns, quad-major [8][16 rows][4]: one byte each, signed (8 bit);
 *        or [4][16 rows][4] bytes, of which the low nibbles are quad 2i, the high ones 2i + 1
 *        (4 bit, 0..15)
 *     d: float16[16], the scale of each row
 *     m: float16[16], only with a minimum
 *
 * and means q * d + m; Q4 without a minimum means (q - 8) * d. A group of the float formats is
 * [32 columns][16 rows].
 */
enum llmrt_format {
    LLMRT_Q4 = 0,  /* 288 bytes per group of a strip */
    LLMRT_Q4M = 1, /* 320 */
    LLMRT_Q8 = 2,  /* 544 */
    LLMRT_Q8M = 3, /* 576 */
    LLMRT_BF16 = 4,
    LLMRT_F32 = 5,
    LLMRT_NUM_FORMATS = 6
};

typedef struct {
    int64_t rows;    /* a multiple of 16: padded */
    int64_t columns; /* a multiple of 32 */
    int64_t format;
    const uint8_t *data; /* aligned to 64 bytes */
} llmrt_weight;

/* A KV block holds, per layer and KV head: K [D][32 tokens], V [32 tokens][D], and in the
 * scaled formats float32 scales of K [32] and of V [32]. */
enum llmrt_kv_format {
    LLMRT_KV_BF16 = 0,
    LLMRT_KV_F32 = 1,
    LLMRT_KV_INT8 = 2, /* q * scale, q from -127 to 127 */
    LLMRT_KV_FP8 = 3   /* e4m3 * scale, scaled to a maximum of 448 */
};

enum llmrt_op_kind {
    LLMRT_OP_EMBED = 0,    /* out = scale * row `token` of weight */
    LLMRT_OP_LINEAR = 1,   /* out (=, +=, gated) weight @ [norm](in) + bias */
    LLMRT_OP_ROPE = 2,     /* q and k of `in`, normed and rotated in place; K and V stored */
    LLMRT_OP_ATTEND = 3,   /* out = attention of q in `in` over the arena */
    LLMRT_OP_ADD_NORM = 4  /* out += norm(in) */
};

enum llmrt_epilogue {
    LLMRT_STORE = 0,
    LLMRT_ADD = 1,
    LLMRT_SILU = 2,     /* strips of weight alternate gate, up; out = act(gate) * up */
    LLMRT_GELU_TANH = 3 /* the same with the tanh form of GELU */
};

enum { LLMRT_OUT_LOGITS = -1 }; /* `out` of the head: rows are those whose logits are wanted */

typedef struct {
    int32_t kind;
    int32_t in; /* buffer numbers */
    int32_t out;
    int32_t out_column;  /* LINEAR: where in a token of `out` the rows of the weight begin */
    int32_t epilogue;    /* LINEAR */
    int32_t is_prepared; /* LINEAR: input, norm and kind of format are those of the op before */
    const llmrt_weight *weight;
    const float *norm; /* [columns], or NULL: the input as it is */
    const float *bias; /* [rows], or NULL */
    float eps;
    float scale;       /* EMBED: of the embedding; ATTEND: of the scores */
    /* ROPE and ATTEND */
    int32_t layer;
    int32_t rope;      /* index into the program's ropes */
    int64_t window;    /* positions seen, or 0: all */
    const float *q_norm; /* [D], or NULL */
    const float *k_norm;
} llmrt_op;

typedef struct {
    const float *inv_freq; /* [rotary_dim / 2], radians per position */
    int32_t rotary_dim;
    int32_t is_interleaved; /* pairs (2i, 2i + 1), else (i, i + rotary_dim / 2) */
    float factor;           /* multiplies cos and sin */
} llmrt_rope;

typedef struct {
    int64_t num_ops;
    const llmrt_op *ops;
    int64_t num_buffers;
    const int64_t *widths; /* float32 per token of each buffer, multiples of 16 */
    int64_t num_ropes;
    const llmrt_rope *ropes;
    int64_t num_layers, num_heads, num_kv_heads, head_dim; /* head_dim a multiple of 16, at
                                                              most 64 heads per KV head */
    int64_t kv_format;
    int64_t vocab_size;
    int64_t max_context;
} llmrt_program;

typedef struct {
    uint8_t *arena;         /* its first block */
    int64_t num_blocks;     /* of the arena */
    const uint32_t *blocks; /* block table: entry i holds positions 32 i to 32 i + 31 */
    int64_t num_table;
    int64_t start;          /* position of the row's first token */
    int64_t num_tokens;     /* its tokens follow those of the row before */
    int64_t num_logits;     /* of the last so many tokens logits are wanted */
} llmrt_row;

typedef struct {
    int64_t num_rows;
    const llmrt_row *rows;
    const uint32_t *tokens; /* [M] */
    float *logits;          /* [sum of num_logits, vocab_size] */
    int32_t *best; /* [sum of num_logits]: id of the highest logit, the lowest id among equals;
                      -1 if a logit is not finite */
    int64_t num_threads; /* that compute it: no more than the engine has, 0 for all of them */
} llmrt_batch;

/* Errors of llmrt_step; nothing is written. `*bad` is the row (first six) or what is said. */
enum llmrt_error {
    LLMRT_OK = 0,
    LLMRT_BAD_RANGE = 1,  /* no token, or positions beyond max_context */
    LLMRT_BAD_TABLE = 2,  /* the block table ends before the row */
    LLMRT_BAD_BLOCK = 3,  /* a block number beyond the arena */
    LLMRT_BAD_TOKEN = 4,  /* a token beyond the vocabulary */
    LLMRT_BAD_LOGITS = 5, /* num_logits outside 0..num_tokens */
    LLMRT_NO_MEMORY = 6
};

typedef struct llmrt_engine llmrt_engine;

/* Instruction families by number, the best first: names, and whether this CPU has them. */
LLMRT_API int llmrt_abi(void);
LLMRT_API const char *llmrt_family_name(int family); /* NULL after the last */
LLMRT_API int llmrt_family_supported(int family);

/* An engine runs the steps of one program on up to `num_threads` threads, the caller's among them.
 * The program and all that it points to must outlive it. NULL: out of memory or no threads. */
LLMRT_API llmrt_engine *llmrt_engine_new(const llmrt_program *program, int family,
                                         int num_threads);
LLMRT_API void llmrt_engine_free(llmrt_engine *engine);
LLMRT_API int llmrt_step(llmrt_engine *engine, const llmrt_batch *batch, int64_t *bad);

/* Bytes of one KV block of all layers, and of a packed weight. */
LLMRT_API int64_t llmrt_block_bytes(const llmrt_program *program);
LLMRT_API int64_t llmrt_packed_bytes(int64_t rows, int64_t columns, int64_t format);

/* Storage kinds that pack.c reads, laid out as in GGUF. */
enum llmrt_source {
    LLMRT_SOURCE_F32 = 0,
    LLMRT_SOURCE_F16,
    LLMRT_SOURCE_BF16,
    LLMRT_SOURCE_Q4_0,
    LLMRT_SOURCE_Q4_1,
    LLMRT_SOURCE_Q5_0,
    LLMRT_SOURCE_Q5_1,
    LLMRT_SOURCE_Q8_0,
    LLMRT_SOURCE_Q4_K,
    LLMRT_SOURCE_Q5_K,
    LLMRT_SOURCE_Q6_K
};

/* Pack `rows` rows of `columns` columns from `source` as `format`, strip i into place i * step
 * after `packed` (step 2 interleaves gate and up). Returns 0, or -1 if source and format do not
 * go together. May be called from several threads for different places. */
LLMRT_API int llmrt_pack(int64_t source_kind, const uint8_t *source, int64_t rows,
                         int64_t columns, int64_t format, uint8_t *packed, int64_t step);

#endif
