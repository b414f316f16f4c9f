/* Products with packed weights: a strip of 16 rows times a tile of tokens.
 *
 * The sum over a group of 32 columns is an exact int32; groups are added in order, in float32.
 * So a token's result is the same in every tile, and in every family.
 *
 * A family defines, in dot_*.h, TILE_TOKENS (4 or 8) and strip_int and strip_float, which compute
 * y[token][row] for a number of tokens that the compiler knows.
 */

/* One function per format and number of tokens; TILE_TOKENS is 4 or 8. */
typedef void (*strip_function)(const uint8_t *w, const prepared *in, int64_t token,
                               int64_t columns, strip_result *y);

#define STRIP(kind, format, num_tokens)                                                          \
    static __attribute__((noinline)) void strip_##format##_##num_tokens(                         \
        const uint8_t *w, const prepared *in, int64_t token, int64_t columns, strip_result *y) { \
        strip_##kind(LLMRT_##format, num_tokens, w, in, token, columns, y);                      \
    }
#define STRIPS(kind, format)                                                                     \
    STRIP(kind, format, 1)                                                                       \
    STRIP(kind, format, 2)                                                                       \
    STRIP(kind, format, 4)                                                                       \
    STRIP_8(kind, format)
#if TILE_TOKENS == 8
#define STRIP_8(kind, format) STRIP(kind, format, 8)
#define BY_TOKENS(format) {strip_##format##_1, strip_##format##_2, strip_##format##_4,           \
                           strip_##format##_8}
#else
#define STRIP_8(kind, format)
#define BY_TOKENS(format) {strip_##format##_1, strip_##format##_2, strip_##format##_4}
#endif
STRIPS(int, Q4)
STRIPS(int, Q4M)
STRIPS(int, Q8)
STRIPS(int, Q8M)
STRIPS(float, BF16)
STRIPS(float, F32)

static const strip_function strips[LLMRT_NUM_FORMATS][4] = {
    BY_TOKENS(Q4), BY_TOKENS(Q4M), BY_TOKENS(Q8), BY_TOKENS(Q8M), BY_TOKENS(BF16), BY_TOKENS(F32)};

/* The largest tile for so many tokens, as a power of two. */
static inline int tile_log2(int64_t num_tokens) {
    if (TILE_TOKENS == 8 && num_tokens >= 8) return 3;
    return num_tokens >= 4 ? 2 : num_tokens >= 2 ? 1 : 0;
}

INLINE void finish(const llmrt_op *op, vf y, vf gate, float *out, int64_t row) {
    if (op->bias) y = vf_add(y, vf_load(op->bias + row));
    if (op->epilogue == LLMRT_SILU) y = vf_mul(vf_silu(gate), y);
    if (op->epilogue == LLMRT_GELU_TANH) y = vf_mul(vf_gelu_tanh(gate), y);
    if (op->epilogue == LLMRT_ADD) y = vf_add(vf_load(out), y);
    vf_store(out, y);
}

/* Where the products go: rows of `width` floats, of which the weight gives `size`. */
typedef struct {
    float *data;
    int64_t width, size;
} output;

static inline output output_of(const llmrt_engine *engine, const llmrt_op *op) {
    if (op->out == LLMRT_OUT_LOGITS) {
        int64_t vocab = engine->program->vocab_size;
        return (output){engine->batch->logits, vocab, vocab};
    }
    return (output){engine->buffers[op->out] + op->out_column, engine->program->widths[op->out],
                    op->weight->rows};
}

/* One strip, or a gate and its up, for all tokens. */
static void linear_unit(const llmrt_op *op, const prepared *in, int64_t total, output out,
                        int64_t idx) {
    const llmrt_weight *weight = op->weight;
    int64_t columns = weight->columns, bytes = strip_bytes(columns, weight->format);
    int is_gated = op->epilogue >= LLMRT_SILU;
    const uint8_t *w = weight->data + (is_gated ? 2 * idx : idx) * bytes;
    strip_result y[TILE_TOKENS], gate[TILE_TOKENS];
    for (int64_t token = 0; token < total;) {
        int size = tile_log2(total - token);
        strip_function strip = strips[weight->format][size];
        if (is_gated) strip(w, in, token, columns, gate);
        strip(is_gated ? w + bytes : w, in, token, columns, y);
        for (int i = 0; i < 1 << size; i++, token++) {
            float *place = out.data + token * out.width + 16 * idx;
            vf gate_values = is_gated ? vf_load(gate[i]) : vf_zero();
            if (16 * idx + 16 <= out.size)
                finish(op, vf_load(y[i]), gate_values, place, 16 * idx);
            else if (16 * idx < out.size) { /* the vocabulary ends within the strip */
                strip_result last = {0};
                finish(op, vf_load(y[i]), gate_values, last, 16 * idx);
                memcpy(place, last, (size_t)(out.size - 16 * idx) * sizeof *place);
            }
        }
    }
}

static void linear(llmrt_engine *engine, const llmrt_op *op, int thread, atomic_long *work) {
    int64_t total = num_inputs(engine, op);
    const prepared *in = is_private(total) ? &engine->own[thread] : &engine->shared;
    output out = output_of(engine, op);
    int64_t num_units = op->weight->rows / LLMRT_STRIP / (op->epilogue >= LLMRT_SILU ? 2 : 1);
    int64_t size = piece(num_units, engine->num_threads);
    for (int64_t begin; (begin = take(work, size)) < num_units;)
        for (int64_t idx = begin; idx < begin + size && idx < num_units; idx++)
            linear_unit(op, in, total, out, idx);
}
