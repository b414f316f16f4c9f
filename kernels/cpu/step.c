/* Engines and steps: checks, working memory, and the ops one after the other. */
#include <math.h>
#include <stdlib.h>

#include "engine.h"

static const llmrt_family *const families[] = {
#if defined(__x86_64__) && defined(__GNUC__)
    &llmrt_avx512,
    &llmrt_avx2,
#endif
    &llmrt_portable,
};
enum { NUM_FAMILIES = sizeof families / sizeof *families };

int llmrt_abi(void) { return LLMRT_ABI; }

const char *llmrt_family_name(int family) {
    return family >= 0 && family < NUM_FAMILIES ? families[family]->name : NULL;
}

int llmrt_family_supported(int family) {
    return family >= 0 && family < NUM_FAMILIES && families[family]->is_supported();
}

int64_t llmrt_block_bytes(const llmrt_program *program) { return block_bytes(program); }

/* ---- working memory ---- */

static int64_t up_to_64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Lays pieces out one after the other: first without memory, to learn the size. */
typedef struct {
    char *memory;
    int64_t used;
} layout;

static void *carve(layout *l, int64_t bytes) {
    void *place = l->memory ? l->memory + l->used : NULL;
    l->used += up_to_64(bytes);
    return place;
}

static int64_t max_columns(const llmrt_program *program) {
    int64_t most = 0;
    for (int64_t i = 0; i < program->num_ops; i++)
        if (program->ops[i].kind == LLMRT_OP_LINEAR && program->ops[i].weight->columns > most)
            most = program->ops[i].weight->columns;
    return most;
}

static prepared carve_prepared(layout *l, int64_t tokens, int64_t columns) {
    int64_t groups = columns / LLMRT_GROUP;
    prepared p;
    p.q = carve(l, tokens * columns);
    p.sum = carve(l, tokens * groups * (int64_t)sizeof *p.sum);
    p.scale = carve(l, tokens * groups * (int64_t)sizeof *p.scale);
    p.scaled_sum = carve(l, tokens * groups * (int64_t)sizeof *p.scaled_sum);
    p.x = carve(l, tokens * columns * (int64_t)sizeof *p.x);
    return p;
}

static void lay_out(llmrt_engine *engine, layout *l, int64_t tokens) {
    const llmrt_program *program = engine->program;
    int64_t columns = max_columns(program);
    for (int64_t i = 0; i < program->num_buffers; i++)
        engine->buffers[i] = carve(l, tokens * program->widths[i] * (int64_t)sizeof(float));
    for (int64_t i = 0; i < program->num_ropes; i++)
        engine->angles[i] =
            carve(l, tokens * program->ropes[i].rotary_dim * (int64_t)sizeof(float));
    engine->positions = carve(l, tokens * (int64_t)sizeof(int64_t));
    engine->wanted = carve(l, tokens * (int64_t)sizeof(int64_t));
    engine->shared = carve_prepared(l, tokens, columns);
    for (int i = 0; i < engine->max_threads; i++) {
        engine->own[i] = carve_prepared(l, PRIVATE_TOKENS, columns);
        engine->scratch[i] =
            carve(l, attention_floats(program->head_dim) * (int64_t)sizeof(float));
    }
}

static int make_room(llmrt_engine *engine, int64_t tokens) {
    if (tokens <= engine->token_capacity) return 1;
    free(engine->arrays);
    engine->arrays = NULL;
    engine->token_capacity = 0;
    layout l = {NULL, 0};
    lay_out(engine, &l, tokens);
    engine->arrays = aligned_alloc(64, (size_t)l.used);
    if (!engine->arrays) return 0;
    l = (layout){engine->arrays, 0};
    lay_out(engine, &l, tokens);
    engine->token_capacity = tokens;
    return 1;
}

/* Make an array hold `count` items; what it held is lost. */
static int reserve(void *array, int64_t *capacity, int64_t count, size_t item) {
    void **memory = array;
    if (count <= *capacity) return 1;
    free(*memory);
    *capacity = 0;
    *memory = calloc((size_t)count, item);
    if (!*memory) return 0;
    *capacity = count;
    return 1;
}

llmrt_engine *llmrt_engine_new(const llmrt_program *program, int family, int num_threads) {
    if (!llmrt_family_supported(family) || num_threads < 1 ||
        program->num_heads / program->num_kv_heads > MAX_TILE_ROWS)
        return NULL;
    llmrt_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return NULL;
    engine->program = program;
    engine->family = families[family];
    engine->max_threads = num_threads;
    engine->buffers = calloc((size_t)program->num_buffers, sizeof *engine->buffers);
    engine->angles = calloc((size_t)program->num_ropes, sizeof *engine->angles);
    engine->own = calloc((size_t)num_threads, sizeof *engine->own);
    engine->scratch = calloc((size_t)num_threads, sizeof *engine->scratch);
    engine->work = calloc((size_t)(2 * program->num_ops + 2), sizeof *engine->work);
    engine->pool = llmrt_pool_new(num_threads);
    if (!engine->buffers || !engine->angles || !engine->own || !engine->scratch ||
        !engine->work || !engine->pool) {
        llmrt_engine_free(engine);
        return NULL;
    }
    return engine;
}

void llmrt_engine_free(llmrt_engine *engine) {
    if (!engine) return;
    llmrt_pool_free(engine->pool);
    void *owned[] = {engine->arrays, engine->buffers, engine->angles,   engine->own,
                     engine->scratch, (void *)engine->work, engine->spans, engine->tiles,
                     engine->units,  engine->partials, (void *)engine->merges};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    free(engine);
}

/* ---- a step ---- */

static int check_row(const llmrt_program *program, const llmrt_row *row) {
    const int64_t most = program->max_context; /* no sum below overflows */
    if (row->start < 0 || row->num_tokens < 1 || row->num_tokens > most ||
        row->start > most - row->num_tokens)
        return LLMRT_BAD_RANGE;
    const int64_t num_blocks = (row->start + row->num_tokens - 1) / LLMRT_BLOCK_TOKENS + 1;
    if (row->num_table < num_blocks) return LLMRT_BAD_TABLE;
    for (int64_t i = 0; i < num_blocks; i++)
        if (row->blocks[i] >= row->num_blocks) return LLMRT_BAD_BLOCK;
    if (row->num_logits < 0 || row->num_logits > row->num_tokens) return LLMRT_BAD_LOGITS;
    return LLMRT_OK;
}

static int check(const llmrt_program *program, const llmrt_batch *batch, int64_t *bad) {
    int64_t token = 0;
    for (*bad = 0; *bad < batch->num_rows; ++*bad) {
        const llmrt_row *row = &batch->rows[*bad];
        int error = check_row(program, row);
        if (error) return error;
        for (int64_t i = 0; i < row->num_tokens; i++)
            if (batch->tokens[token + i] >= program->vocab_size) return LLMRT_BAD_TOKEN;
        token += row->num_tokens;
        if (token > INT32_MAX) return LLMRT_NO_MEMORY; /* tables have 32 bits */
    }
    return LLMRT_OK;
}

static int64_t segments_of(int64_t position) {
    return position / (LLMRT_SEGMENT_BLOCKS * LLMRT_BLOCK_TOKENS) + 1;
}

static int64_t tile_tokens(const llmrt_program *program) {
    int64_t tokens = MAX_TILE_ROWS / (program->num_heads / program->num_kv_heads);
    return tokens > MAX_TILE_TOKENS ? MAX_TILE_TOKENS : tokens < 1 ? 1 : tokens;
}

static void add_spans(llmrt_engine *engine, const llmrt_row *row, int64_t idx, int64_t token) {
    for (int64_t done = 0; done < row->num_tokens;) {
        int64_t position = row->start + done, slot = position % LLMRT_BLOCK_TOKENS;
        int64_t count = LLMRT_BLOCK_TOKENS - slot;
        if (count > row->num_tokens - done) count = row->num_tokens - done;
        engine->spans[engine->num_spans++] =
            (span){(int32_t)idx, (int32_t)(token + done), (int32_t)count,
                   row->blocks[position / LLMRT_BLOCK_TOKENS]};
        done += count;
    }
}

static void add_tiles(llmrt_engine *engine, const llmrt_row *row, int64_t idx, int64_t token,
                      int64_t *num_partials) {
    int64_t most = tile_tokens(engine->program);
    int is_split = row->num_tokens <= SPLIT_TOKENS;
    for (int64_t done = 0; done < row->num_tokens;) {
        int64_t count = row->num_tokens - done < most ? row->num_tokens - done : most;
        int64_t segments = is_split ? segments_of(row->start + done + count - 1) : 1;
        int32_t place = (int32_t)engine->num_tiles++;
        engine->tiles[place] = (tile){(int32_t)idx, (int32_t)(token + done), (int32_t)count,
                                      (int32_t)segments, *num_partials};
        if (segments > 1) {
            *num_partials += segments * engine->program->num_heads * count;
            for (int32_t s = 0; s < segments; s++)
                engine->units[engine->num_units++] = (unit){place, s};
        } else {
            engine->units[engine->num_units++] = (unit){place, -1};
        }
        done += count;
    }
}

/* Room for the tables of this step: bounds on spans, tiles and units. */
static int make_tables(llmrt_engine *engine) {
    const llmrt_batch *batch = engine->batch;
    int64_t spans = 0, tiles = 0, units = 0, partials = 0, most = tile_tokens(engine->program);
    for (int64_t i = 0; i < batch->num_rows; i++) {
        const llmrt_row *row = &batch->rows[i];
        int64_t row_tiles = (row->num_tokens + most - 1) / most;
        spans += row->num_tokens / LLMRT_BLOCK_TOKENS + 2;
        tiles += row_tiles;
        int64_t segments = row->num_tokens <= SPLIT_TOKENS
                               ? segments_of(row->start + row->num_tokens - 1)
                               : 1;
        units += row_tiles * segments;
        if (segments > 1) partials += segments * row->num_tokens * engine->program->num_heads;
    }
    return reserve(&engine->spans, &engine->span_capacity, spans, sizeof *engine->spans) &&
           reserve(&engine->tiles, &engine->tile_capacity, tiles, sizeof *engine->tiles) &&
           reserve(&engine->units, &engine->unit_capacity, units, sizeof *engine->units) &&
           reserve(&engine->partials, &engine->partial_capacity,
                   partials * partial_floats(engine->program), sizeof *engine->partials) &&
           reserve((void *)&engine->merges, &engine->merge_capacity,
                   tiles * engine->program->num_heads, sizeof *engine->merges);
}

static void plan(llmrt_engine *engine) {
    const llmrt_program *program = engine->program;
    const llmrt_batch *batch = engine->batch;
    int64_t token = 0, num_partials = 0;
    engine->num_spans = engine->num_tiles = engine->num_units = engine->num_wanted = 0;
    for (int64_t i = 0; i < batch->num_rows; i++) {
        const llmrt_row *row = &batch->rows[i];
        for (int64_t j = 0; j < row->num_tokens; j++)
            engine->positions[token + j] = row->start + j;
        for (int64_t j = row->num_tokens - row->num_logits; j < row->num_tokens; j++)
            engine->wanted[engine->num_wanted++] = token + j;
        add_spans(engine, row, i, token);
        add_tiles(engine, row, i, token, &num_partials);
        token += row->num_tokens;
    }
    int64_t group = program->num_heads / program->num_kv_heads;
    int is_few = engine->num_units * program->num_kv_heads < 4 * engine->num_threads;
    engine->head_parts = engine->num_threads > 1 && is_few ? group : 1;
}

/* cos and sin of every position, once for all layers. */
static void turn(llmrt_engine *engine, atomic_long *work) {
    const llmrt_program *program = engine->program;
    for (int64_t token; (token = take(work, 1)) < engine->num_tokens;) {
        float position = (float)engine->positions[token];
        for (int64_t r = 0; r < program->num_ropes; r++) {
            const llmrt_rope *rope = &program->ropes[r];
            int half = rope->rotary_dim / 2;
            float *angles = engine->angles[r] + token * rope->rotary_dim;
            for (int i = 0; i < half; i++) {
                double angle = (double)(position * rope->inv_freq[i]);
                angles[i] = (float)cos(angle) * rope->factor;
                angles[half + i] = (float)sin(angle) * rope->factor;
            }
        }
    }
}

static void run_linear(llmrt_engine *engine, const llmrt_op *op, int thread, atomic_long *work) {
    int64_t total = num_inputs(engine, op);
    if (!total) return;
    if (!op->is_prepared) {
        engine->family->prepare(engine, op, thread, work);
        if (!is_private(total)) llmrt_pool_barrier(engine->pool);
    }
    engine->family->linear(engine, op, thread, work + 1);
    llmrt_pool_barrier(engine->pool);
}

static void run_ops(void *context, int thread) {
    llmrt_engine *engine = context;
    const llmrt_program *program = engine->program;
    const llmrt_family *family = engine->family;
    atomic_long *work = engine->work;
    turn(engine, work + 2 * program->num_ops);
    for (int64_t i = 0; i < program->num_ops; i++, work += 2) {
        const llmrt_op *op = &program->ops[i];
        switch (op->kind) {
        case LLMRT_OP_LINEAR: /* has a barrier of its own */
            run_linear(engine, op, thread, work);
            continue;
        case LLMRT_OP_EMBED:
            family->embed(engine, op, work);
            break;
        case LLMRT_OP_ROPE:
            family->rope(engine, op, work);
            break;
        case LLMRT_OP_ATTEND:
            family->attend(engine, op, thread, work);
            break;
        case LLMRT_OP_ADD_NORM:
            family->add_norm(engine, op, work);
            break;
        }
        llmrt_pool_barrier(engine->pool);
    }
    family->best(engine, work + 1);
}

int llmrt_step(llmrt_engine *engine, const llmrt_batch *batch, int64_t *bad) {
    const llmrt_program *program = engine->program;
    int error = check(program, batch, bad);
    if (error) return error;
    engine->batch = batch;
    engine->num_tokens = 0;
    for (int64_t i = 0; i < batch->num_rows; i++) engine->num_tokens += batch->rows[i].num_tokens;
    if (!engine->num_tokens) return LLMRT_OK;
    int64_t wanted = batch->num_threads;
    engine->num_threads =
        wanted < 1 || wanted > engine->max_threads ? engine->max_threads : (int)wanted;
    if (!make_room(engine, engine->num_tokens) || !make_tables(engine)) return LLMRT_NO_MEMORY;
    plan(engine);
    for (int64_t i = 0; i < 2 * program->num_ops + 2; i++)
        atomic_store_explicit(&engine->work[i], 0, memory_order_relaxed);
    llmrt_pool_run(engine->pool, engine->num_threads, run_ops, engine);
    return LLMRT_OK;
}
