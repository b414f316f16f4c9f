/* Attention over the paged cache, block after block with a running maximum (Dao et al.,
 * FlashAttention-2, 2023), in segments of 8 blocks at fixed positions, merged in order.
 *
 * The sums of a query row are the same whichever rows share its tile and whether its segments
 * are computed by one thread or by several: blocks that a row does not see leave its state as it
 * is. Four rows go through a block together, ATTEND_WIDTH registers of columns at a time.
 */

#define LOWEST -1e30f

/* Running state of one query row: sums [D] apart, here the maximum and the sum of weights. */
typedef struct {
    float highest, weight;
} row_state;

/* What one unit works on. */
typedef struct {
    const llmrt_program *program;
    const llmrt_row *row;
    int64_t layer, kv_head, window;
    int64_t num_rows; /* query rows: tokens * heads, the heads of a token side by side */
    int64_t num_heads, first_position;
    float *q;      /* [rows][D], scaled */
    float *sums;   /* [rows][D] of the running segment */
    float *totals; /* [rows][D] of the segments before */
    float *scores; /* [rows][32] */
    float *keys;   /* [D][32] of the running block, if rows are many */
    float *values; /* [32][D] */
    row_state state[MAX_TILE_ROWS], total[MAX_TILE_ROWS];
} attention;

INLINE int64_t row_position(const attention *a, int64_t row) {
    return a->first_position + row / a->num_heads;
}

/* Ask for `bytes` at `place`, once for all columns. */
INLINE void fetch(const uint8_t *from, int64_t place, int64_t bytes, int64_t column) {
    if (from && !column)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + place + i, 0, 2);
}

/* scores[r][32] = q[r] . keys, 16 * ATTEND_WIDTH columns at a time. Blocks lie far apart: a little
 * of the next one's keys is fetched with each dim, and of its values with each position below. */
INLINE void score_rows(const int format, const int num_rows, const float *q, const void *keys,
                       const uint8_t *next, int64_t size, float *scores) {
    for (int column = 0; column < 32; column += 16 * ATTEND_WIDTH) {
        vf sum[4][ATTEND_WIDTH];
        UNROLL
        for (int r = 0; r < num_rows; r++)
            UNROLL
            for (int c = 0; c < ATTEND_WIDTH; c++) sum[r][c] = vf_zero();
        for (int64_t d = 0; d < size; d++) {
            fetch(next, 32 * kv_element_bytes(format) * d, 32 * kv_element_bytes(format), column);
            vf k[ATTEND_WIDTH];
            UNROLL
            for (int c = 0; c < ATTEND_WIDTH; c++)
                k[c] = vf_kept(kv_load_pairs(format, keys, 32 * d + column + 16 * c));
            UNROLL
            for (int r = 0; r < num_rows; r++) {
                vf x = vf_set1(q[r * size + d]);
                UNROLL
                for (int c = 0; c < ATTEND_WIDTH; c++) sum[r][c] = vf_fma(x, k[c], sum[r][c]);
            }
        }
        UNROLL
        for (int r = 0; r < num_rows; r++)
            UNROLL
            for (int c = 0; c < ATTEND_WIDTH; c++)
                vf_store(scores + 32 * r + column + 16 * c, kv_from_pairs(format, sum[r][c]));
    }
}

/* sums[r] += weights[r][first..end-1] @ values, for 16 * width columns from `column` */
INLINE void add_columns(const int format, const int num_rows, const int width,
                        const float *weights, const void *values, const uint8_t *next,
                        int64_t size, int64_t column, int first, int end, float *sums) {
    vf sum[4][ATTEND_WIDTH];
    UNROLL
    for (int r = 0; r < num_rows; r++)
        UNROLL
        for (int c = 0; c < width; c++)
            sum[r][c] = kv_to_pairs(format, vf_load(sums + r * size + column + 16 * c));
    for (int i = first; i < end; i++) {
        fetch(next, i * size * kv_element_bytes(format), size * kv_element_bytes(format), column);
        vf v[ATTEND_WIDTH];
        UNROLL
        for (int c = 0; c < width; c++)
            v[c] = vf_kept(kv_load_pairs(format, values, i * size + column + 16 * c));
        UNROLL
        for (int r = 0; r < num_rows; r++) {
            vf x = vf_set1(weights[32 * r + i]);
            UNROLL
            for (int c = 0; c < width; c++) sum[r][c] = vf_fma(x, v[c], sum[r][c]);
        }
    }
    UNROLL
    for (int r = 0; r < num_rows; r++)
        UNROLL
        for (int c = 0; c < width; c++)
            vf_store(sums + r * size + column + 16 * c, kv_from_pairs(format, sum[r][c]));
}

INLINE void add_rows(const int format, const int num_rows, const float *weights,
                     const void *values, const uint8_t *next, int64_t size, int first, int end,
                     float *sums) {
    int64_t column = 0;
    for (; column + 16 * ATTEND_WIDTH <= size; column += 16 * ATTEND_WIDTH)
        add_columns(format, num_rows, ATTEND_WIDTH, weights, values, next, size, column, first,
                    end, sums);
    for (; column < size; column += 16)
        add_columns(format, num_rows, 1, weights, values, next, size, column, first, end, sums);
}

/* Both for a format and a number of rows that the compiler knows. */
typedef struct {
    void (*score)(const float *q, const void *keys, const uint8_t *next, int64_t size,
                  float *scores);
    void (*add)(const float *weights, const void *values, const uint8_t *next, int64_t size,
                int first, int end, float *sums);
} row_functions;

#define ROWS(format, num_rows)                                                                   \
    static __attribute__((noinline)) void score_##format##_##num_rows(                           \
        const float *q, const void *keys, const uint8_t *next, int64_t size, float *scores) {    \
        score_rows(LLMRT_KV_##format, num_rows, q, keys, next, size, scores);                    \
    }                                                                                            \
    static __attribute__((noinline)) void add_##format##_##num_rows(                             \
        const float *weights, const void *values, const uint8_t *next, int64_t size, int first,  \
        int end, float *sums) {                                                                  \
        add_rows(LLMRT_KV_##format, num_rows, weights, values, next, size, first, end, sums);    \
    }
#define UP_TO_4(format) ROWS(format, 1) ROWS(format, 2) ROWS(format, 3) ROWS(format, 4)
UP_TO_4(BF16)
UP_TO_4(F32)
UP_TO_4(INT8)
UP_TO_4(FP8)

#define PAIR(format, num_rows) {score_##format##_##num_rows, add_##format##_##num_rows}
#define BY_ROWS(format) {PAIR(format, 1), PAIR(format, 2), PAIR(format, 3), PAIR(format, 4)}
static const row_functions by_format[][4] = {BY_ROWS(BF16), BY_ROWS(F32), BY_ROWS(INT8),
                                             BY_ROWS(FP8)};

INLINE void scale_row(float *x, int64_t size, float factor) {
    vf f = vf_set1(factor);
    for (int64_t i = 0; i < size; i += 16) vf_store(x + i, vf_mul(vf_load(x + i), f));
}

INLINE float exp_of(float x) {
    float lanes[16];
    vf_store(lanes, vf_exp(vf_set1(x)));
    return lanes[0];
}

/* From scores to weights, for the positions first..end-1 of the block; the sums follow. */
INLINE void weigh_row(float *scores, int first, int end, const float *k_scales,
                      const float *v_scales, row_state *state, float *sums, int64_t size) {
    const vf hidden = vf_set1(-INFINITY);
    vf low = vf_load(scores), high = vf_load(scores + 16);
    if (k_scales) {
        low = vf_mul(low, vf_load(k_scales));
        high = vf_mul(high, vf_load(k_scales + 16));
    }
    int sees_all = first == 0 && end == 32;
    if (!sees_all) {
        low = vf_range(first, end, low, hidden);
        high = vf_range(first - 16, end - 16, high, hidden);
    }
    float block_highest = vf_highest(vf_max(low, high));
    if (!(block_highest <= state->highest)) {
        float factor = exp_of(state->highest - block_highest);
        state->highest = block_highest;
        state->weight *= factor;
        scale_row(sums, size, factor);
    }
    vf highest = vf_set1(state->highest);
    low = vf_exp(vf_sub(low, highest));
    high = vf_exp(vf_sub(high, highest));
    state->weight += vf_sum(vf_add(low, high));
    if (v_scales) { /* unwritten slots have any scale */
        low = vf_mul(low, vf_range(first, end, vf_load(v_scales), vf_zero()));
        high = vf_mul(high, vf_range(first - 16, end - 16, vf_load(v_scales + 16), vf_zero()));
    }
    vf_store(scores, low);
    vf_store(scores + 16, high);
}

/* Rows row..row+num_rows-1 of the tile against one block. */
static void block_rows(attention *a, const row_functions *functions, int num_rows, int64_t row,
                       int64_t block, const void *keys, const void *values, const float *scales,
                       const uint8_t *next) {
    const int64_t size = a->program->head_dim, begin = block * LLMRT_BLOCK_TOKENS;
    float *scores = a->scores + 32 * row;
    int seen_first = 32, seen_end = 0;
    functions->score(a->q + row * size, keys, next, size, scores);
    for (int r = 0; r < num_rows; r++) {
        int64_t position = row_position(a, row + r);
        int64_t oldest = a->window ? position - a->window + 1 - begin : 0;
        int first = oldest > 0 ? oldest < 32 ? (int)oldest : 32 : 0;
        int end = position + 1 - begin < 32 ? (int)(position + 1 - begin) : 32;
        if (first >= end) { /* sees nothing of the block */
            vf_store(scores + 32 * r, vf_zero());
            vf_store(scores + 32 * r + 16, vf_zero());
            continue;
        }
        weigh_row(scores + 32 * r, first, end, scales, scales ? scales + 32 : NULL,
                  &a->state[row + r], a->sums + (row + r) * size, size);
        if (first < seen_first) seen_first = first;
        if (end > seen_end) seen_end = end;
    }
    const int64_t bytes = size * LLMRT_BLOCK_TOKENS * kv_element_bytes(a->program->kv_format);
    functions->add(scores, values, next ? next + bytes : NULL, size, seen_first, seen_end,
                   a->sums + row * size);
}

static void block_all(int64_t format, attention *a, int64_t block, const void *keys,
                      const void *values, const float *scales, const uint8_t *next) {
    for (int64_t row = 0; row < a->num_rows; row += 4) {
        int count = a->num_rows - row < 4 ? (int)(a->num_rows - row) : 4;
        block_rows(a, &by_format[format][count - 1], count, row, block, keys, values, scales,
                   row ? NULL : next);
    }
}

INLINE void widen(const int format, const void *from, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += 16) vf_store(to + i, kv_load(format, from, i));
}

INLINE const uint8_t *keys_of(const attention *a, int64_t block) {
    return head_of_block(a->program, a->row, a->row->blocks[block], a->layer, a->kv_head);
}

/* One byte per element takes long to widen: for many rows it is done once. */
static void attend_block(attention *a, int64_t block, int64_t end) {
    const int64_t format = a->program->kv_format;
    const int64_t elements = a->program->head_dim * LLMRT_BLOCK_TOKENS;
    const int64_t bytes = elements * kv_element_bytes(format);
    const uint8_t *keys = keys_of(a, block);
    const float *scales = is_scaled(format) ? (const float *)(keys + 2 * bytes) : NULL;
    if (!is_scaled(format) || a->num_rows <= 4) {
        const uint8_t *next = block + 1 < end ? keys_of(a, block + 1) : NULL;
        block_all(format, a, block, keys, keys + bytes, scales, next);
        return;
    }
    if (format == LLMRT_KV_INT8) {
        widen(LLMRT_KV_INT8, keys, elements, a->keys);
        widen(LLMRT_KV_INT8, keys + bytes, elements, a->values);
    } else {
        widen(LLMRT_KV_FP8, keys, elements, a->keys);
        widen(LLMRT_KV_FP8, keys + bytes, elements, a->values);
    }
    block_all(LLMRT_KV_F32, a, block, a->keys, a->values, scales, NULL);
}

static void clear(row_state *state, float *sums, int64_t num_rows, int64_t size) {
    for (int64_t r = 0; r < num_rows; r++) state[r] = (row_state){LOWEST, 0.0f};
    memset(sums, 0, (size_t)(num_rows * size) * sizeof *sums);
}

/* total += part, both sums of weights relative to their maximum. */
static void merge(row_state *total, float *totals, const row_state *part, const float *sums,
                  int64_t size) {
    float highest = total->highest > part->highest ? total->highest : part->highest;
    float old = exp_of(total->highest - highest), new = exp_of(part->highest - highest);
    total->weight = total->weight * old + part->weight * new;
    total->highest = highest;
    vf f_old = vf_set1(old), f_new = vf_set1(new);
    for (int64_t i = 0; i < size; i += 16)
        vf_store(totals + i, vf_fma(vf_load(totals + i), f_old, vf_mul(vf_load(sums + i), f_new)));
}

static void attend_segment(attention *a, int64_t segment) {
    const int64_t last_position = row_position(a, a->num_rows - 1);
    const int64_t oldest = a->window ? a->first_position - a->window + 1 : 0;
    int64_t block = segment * LLMRT_SEGMENT_BLOCKS, end = block + LLMRT_SEGMENT_BLOCKS;
    if (oldest > 0 && oldest / LLMRT_BLOCK_TOKENS > block) block = oldest / LLMRT_BLOCK_TOKENS;
    if (last_position / LLMRT_BLOCK_TOKENS + 1 < end)
        end = last_position / LLMRT_BLOCK_TOKENS + 1;
    clear(a->state, a->sums, a->num_rows, a->program->head_dim);
    for (; block < end; block++) attend_block(a, block, end);
}

INLINE void put_out(const row_state *state, const float *sums, int64_t size, float *out) {
    vf factor = vf_set1(1.0f / state->weight);
    for (int64_t i = 0; i < size; i += 16) vf_store(out + i, vf_mul(vf_load(sums + i), factor));
}

/* Where the result of a query row of the tile goes. */
INLINE float *out_of(const llmrt_engine *engine, const llmrt_op *op, const tile *t,
                     int64_t first_head, int64_t num_heads, int64_t row) {
    int64_t token = t->token + row / num_heads, head = first_head + row % num_heads;
    return engine->buffers[op->out] + token * engine->program->widths[op->out] +
           head * engine->program->head_dim;
}

/* Partial results lie as [segment][head part][row]: sums, maximum, weight. */
INLINE float *partial_of(const llmrt_engine *engine, const tile *t, int64_t segment,
                         int64_t head, int64_t row_in_head) {
    int64_t rows_of_head = t->num_tokens;
    int64_t place = (segment * engine->program->num_heads + head) * rows_of_head + row_in_head;
    return engine->partials + (t->first_partial + place) * partial_floats(engine->program);
}

static void merge_partials(const llmrt_engine *engine, const llmrt_op *op, const tile *t,
                           attention *a, int64_t first_head) {
    const int64_t size = a->program->head_dim;
    for (int64_t row = 0; row < a->num_rows; row++) {
        row_state total = {LOWEST, 0.0f};
        memset(a->totals, 0, (size_t)size * sizeof *a->totals);
        for (int64_t segment = 0; segment < t->num_segments; segment++) {
            const float *p = partial_of(engine, t, segment, first_head + row % a->num_heads,
                                        row / a->num_heads);
            row_state part = {p[size], p[size + 1]};
            merge(&total, a->totals, &part, p, size);
        }
        put_out(&total, a->totals, size,
                out_of(engine, op, t, first_head, a->num_heads, row));
    }
}

static void set_up(const llmrt_engine *engine, const llmrt_op *op, const tile *t,
                   int64_t first_head, int64_t num_heads, float *scratch, attention *a) {
    const llmrt_program *program = engine->program;
    const int64_t size = program->head_dim, width = program->widths[op->in];
    a->program = program;
    a->row = &engine->batch->rows[t->row];
    a->layer = op->layer;
    a->kv_head = first_head / (program->num_heads / program->num_kv_heads);
    a->window = op->window < program->max_context ? op->window : 0;
    a->num_heads = num_heads;
    a->num_rows = t->num_tokens * num_heads;
    a->first_position = engine->positions[t->token];
    a->q = scratch;
    a->sums = a->q + MAX_TILE_ROWS * size;
    a->totals = a->sums + MAX_TILE_ROWS * size;
    a->scores = a->totals + MAX_TILE_ROWS * size;
    a->keys = a->scores + MAX_TILE_ROWS * 32;
    a->values = a->keys + 32 * size;
    vf scale = vf_set1(op->scale);
    for (int64_t row = 0; row < a->num_rows; row++) {
        const float *q = engine->buffers[op->in] + (t->token + row / num_heads) * width +
                         (first_head + row % num_heads) * size;
        for (int64_t i = 0; i < size; i += 16)
            vf_store(a->q + row * size + i, vf_mul(vf_load(q + i), scale));
    }
}

static void attend_unit(llmrt_engine *engine, const llmrt_op *op, const unit *u, int64_t part,
                        float *scratch) {
    const llmrt_program *program = engine->program;
    const tile *t = &engine->tiles[u->tile];
    const int64_t size = program->head_dim, parts = engine->head_parts;
    const int64_t num_heads = program->num_heads / (program->num_kv_heads * parts);
    attention a;
    set_up(engine, op, t, part * num_heads, num_heads, scratch, &a);
    if (u->segment >= 0) {
        attend_segment(&a, u->segment);
        for (int64_t row = 0; row < a.num_rows; row++) {
            float *p = partial_of(engine, t, u->segment, part * num_heads + row % num_heads,
                                  row / num_heads);
            memcpy(p, a.sums + row * size, (size_t)size * sizeof *p);
            p[size] = a.state[row].highest;
            p[size + 1] = a.state[row].weight;
        }
        atomic_int *merged = &engine->merges[u->tile * program->num_kv_heads * parts + part];
        if (atomic_fetch_add_explicit(merged, 1, memory_order_acq_rel) == t->num_segments - 1) {
            atomic_store_explicit(merged, 0, memory_order_relaxed);
            merge_partials(engine, op, t, &a, part * num_heads);
        }
        return;
    }
    int64_t oldest = a.window ? a.first_position - a.window + 1 : 0;
    const int64_t segment_tokens = LLMRT_SEGMENT_BLOCKS * LLMRT_BLOCK_TOKENS;
    const int64_t last = row_position(&a, a.num_rows - 1) / segment_tokens;
    clear(a.total, a.totals, a.num_rows, size);
    for (int64_t segment = oldest > 0 ? oldest / segment_tokens : 0; segment <= last; segment++) {
        attend_segment(&a, segment);
        for (int64_t row = 0; row < a.num_rows; row++)
            merge(&a.total[row], a.totals + row * size, &a.state[row], a.sums + row * size, size);
    }
    for (int64_t row = 0; row < a.num_rows; row++)
        put_out(&a.total[row], a.totals + row * size, size,
                out_of(engine, op, t, part * num_heads, num_heads, row));
}

static void attend(llmrt_engine *engine, const llmrt_op *op, int thread, atomic_long *work) {
    const int64_t num_parts = engine->program->num_kv_heads * engine->head_parts;
    const int64_t total = engine->num_units * num_parts;
    for (int64_t i; (i = take(work, 1)) < total;)
        attend_unit(engine, op, &engine->units[i / num_parts], i % num_parts,
                    engine->scratch[thread]);
}
