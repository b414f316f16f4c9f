/* Hashes of what random programs compute, to compare instruction families, machines and numbers
 * of threads: driver FAMILY THREADS[,THREADS...] FIRST_CASE END_CASE
 *
 * A case is a program and some steps, both made from its number alone, by integers and exact
 * float32 operations. Its line says what it has, then the hashes of logits, KV bytes and best
 * tokens. A NaN counts as a NaN: its sign and payload are the machine's. Ends with 1 if two
 * numbers of threads differ. Only abi.h is used.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

enum { RESIDUAL, QKV, ATTENDED, GATED, UNNORMED, NUM_BUFFERS };
enum { MAX_OPS = 32, MAX_LAYERS = 2, NUM_SEQUENCES = 7, NUM_STEPS = 9, MAX_CHUNK = 130 };
enum { NUM_BLOCKS = 80, MAX_CONTEXT = 1024, MAX_TABLE = MAX_CONTEXT / 32, MAX_OWNED = 256 };

static const char *const FORMATS[] = {"q4", "q4m", "q8", "q8m", "bf16", "f32"};
static const char *const KV_FORMATS[] = {"bf16", "f32", "int8", "fp8"};
static const int HEAD_SIZES[] = {64, 16, 80, 128, 96, 256};

/* ---- random numbers (splitmix64: Steele et al., 2014) ---- */

static uint64_t state;

static uint64_t draw(void) {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int64_t below(int64_t limit) { return (int64_t)(draw() % (uint64_t)limit); }
static int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
static int one_in(int64_t count) { return below(count) == 0; }

/* Triangular around 0, up to `largest`, which is a power of two. */
static float around_zero(float largest) {
    return (float)(between(-0x7fff, 0x7fff) + between(-0x7fff, 0x7fff)) * (0x1p-16f * largest);
}

/* ---- memory of a case ---- */

static void *owned[MAX_OWNED];
static int num_owned;

static void *allocate(int64_t bytes) {
    void *memory = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    if (!memory || num_owned == MAX_OWNED) abort();
    return owned[num_owned++] = memory;
}

static void release(void) {
    while (num_owned) free(owned[--num_owned]);
}

static float *vector(int64_t size, float middle, float largest) {
    float *values = allocate(size * 4);
    for (int64_t i = 0; i < size; i++) values[i] = middle + around_zero(largest);
    return values;
}

/* ---- weights, packed at random ---- */

typedef struct {
    int format, kv_format, is_extreme, is_spoilt;
} kind;

static uint16_t half(int exponent) {
    if (one_in(200)) return (uint16_t)(below(2) << 15 | below(1024)); /* subnormal */
    return (uint16_t)(below(2) << 15 | (uint64_t)(15 + exponent) << 10 | (uint64_t)below(1024));
}

static void fill_group(int format, int is_extreme, uint8_t *group) {
    if (format >= LLMRT_BF16) {
        for (int i = 0; i < 512; i++) {
            float value = is_extreme ? 0.125f : around_zero(0.25f);
            uint32_t bits;
            memcpy(&bits, &value, 4);
            uint16_t top = (uint16_t)(bits >> 16);
            if (format == LLMRT_F32)
                memcpy(group + 4 * i, &bits, 4);
            else
                memcpy(group + 2 * i, &top, 2);
        }
        return;
    }
    int has_minimum = format == LLMRT_Q4M || format == LLMRT_Q8M, is_4bit = format <= LLMRT_Q4M;
    int q_bytes = is_4bit ? 256 : 512, exponent = is_4bit ? -7 : -10;
    uint8_t extreme = is_4bit ? 0xff : one_in(4) ? 0x7f : 0x80;
    for (int i = 0; i < q_bytes; i++) group[i] = is_extreme ? extreme : (uint8_t)draw();
    for (int i = 0; i < (has_minimum ? 32 : 16); i++) {
        uint16_t scale = half(i < 16 ? exponent : is_4bit ? -4 : -6);
        memcpy(group + q_bytes + 2 * i, &scale, 2);
    }
}

static const llmrt_weight *weight(int format, int is_extreme, int64_t rows, int64_t columns) {
    static const int GROUP_BYTES[] = {288, 320, 544, 576, 1024, 2048};
    int64_t strips = (rows + 15) / 16, bytes = llmrt_packed_bytes(16, columns, format);
    uint8_t *data = allocate(strips * bytes);
    memset(data, 0xff, (size_t)(strips * bytes));
    for (int64_t strip = 0; strip < strips; strip++)
        for (int64_t g = 0; g < columns / 32; g++)
            fill_group(format, is_extreme, data + strip * bytes + g * GROUP_BYTES[format]);
    llmrt_weight *made = allocate(sizeof *made);
    *made = (llmrt_weight){strips * 16, columns, format, data};
    return made;
}

/* Rows of the embedding in float32: usual ones, constant, tiny, huge, and damaged ones. */
static const llmrt_weight *embedding(const kind *k, int64_t rows, int64_t columns) {
    if (!k->is_spoilt && !k->is_extreme) return weight(k->format, 0, rows, columns);
    const llmrt_weight *made = weight(LLMRT_F32, 0, rows, columns);
    float *values = (float *)(uintptr_t)made->data;
    static const uint32_t DAMAGED[] = {0x7fc00000, 0x7f800000, 0xff800000, 0x7f000000};
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < columns; c++) {
            float *value = &values[row / 16 * columns * 16 + c * 16 + row % 16];
            if (k->is_extreme) *value = row % 3 ? 1.0f : -1.0f;
            if (!k->is_spoilt) continue;
            if (row % 4 == 1) *value *= row % 8 == 1 ? 0x1p-140f : 0x1p-126f;
            if (row % 16 == 2 && c % 37 == row % 37) memcpy(value, &DAMAGED[row / 16 % 4], 4);
        }
    return made;
}

/* ---- programs ---- */

static llmrt_op ops[MAX_OPS];
static int64_t widths[NUM_BUFFERS];
static llmrt_rope ropes[2];

static llmrt_op *add(llmrt_program *p, int op_kind, int in, int out) {
    llmrt_op *op = &ops[p->num_ops++];
    *op = (llmrt_op){.kind = op_kind, .in = in, .out = out, .eps = 1e-5f, .scale = 1.0f};
    return op;
}

static llmrt_op *add_linear(llmrt_program *p, const kind *k, int in, int out, int64_t rows,
                            const float *norm) {
    llmrt_op *op = add(p, LLMRT_OP_LINEAR, in, out);
    op->weight = weight(k->format, k->is_extreme, rows, widths[in]);
    op->norm = norm;
    op->bias = one_in(2) ? vector(rows, 0.0f, 0.125f) : NULL;
    return op;
}

/* Query, key and value by one product, or by three of several formats. */
static void add_qkv(llmrt_program *p, const kind *k, const float *norm) {
    int64_t rows[] = {p->num_heads * p->head_dim, p->num_kv_heads * p->head_dim,
                      p->num_kv_heads * p->head_dim};
    if (one_in(2)) {
        add_linear(p, k, RESIDUAL, QKV, widths[QKV], norm);
        return;
    }
    int column = 0, before = -1;
    for (int i = 0; i < 3; i++) {
        kind other = *k;
        if (i) other.format = (int)below(LLMRT_NUM_FORMATS);
        llmrt_op *op = add_linear(p, &other, RESIDUAL, QKV, rows[i], norm);
        op->out_column = column;
        op->is_prepared = before == (other.format >= LLMRT_BF16);
        column += (int)rows[i];
        before = other.format >= LLMRT_BF16;
    }
}

static void add_to_residual(llmrt_program *p, const kind *k, int in) {
    if (one_in(3)) {
        add_linear(p, k, in, UNNORMED, widths[RESIDUAL], NULL);
        add(p, LLMRT_OP_ADD_NORM, UNNORMED, RESIDUAL)->norm = vector(widths[RESIDUAL], 1, 0.25f);
    } else {
        add_linear(p, k, in, RESIDUAL, widths[RESIDUAL], NULL)->epilogue = LLMRT_ADD;
    }
}

static void add_layer(llmrt_program *p, const kind *k, int layer) {
    static const int64_t WINDOWS[] = {0, 0, 1, 20, 32, 100, 300, INT64_MAX};
    int64_t window = WINDOWS[below(8)];
    int rope = (int)below(2), has_qk_norm = one_in(2);
    add_qkv(p, k, vector(widths[RESIDUAL], 1.0f, 0.25f));
    llmrt_op *op = add(p, LLMRT_OP_ROPE, QKV, QKV);
    op->layer = layer;
    op->rope = rope;
    op->q_norm = has_qk_norm ? vector(p->head_dim, 1.0f, 0.25f) : NULL;
    op->k_norm = has_qk_norm ? vector(p->head_dim, 1.0f, 0.25f) : NULL;
    op = add(p, LLMRT_OP_ATTEND, QKV, ATTENDED);
    op->layer = layer;
    op->window = window;
    op->scale = 0.125f;
    add_to_residual(p, k, ATTENDED);
    op = add_linear(p, k, RESIDUAL, GATED, 2 * widths[GATED], vector(widths[RESIDUAL], 1, 0.25f));
    op->epilogue = one_in(2) ? LLMRT_SILU : LLMRT_GELU_TANH;
    add_to_residual(p, k, GATED);
}

static void make_ropes(int head_dim) {
    for (int r = 0; r < 2; r++) {
        int rotary_dim = r && head_dim > 16 ? head_dim / 2 : head_dim;
        float *inv_freq = allocate(rotary_dim * 2), frequency = 1.0f;
        for (int i = 0; i < rotary_dim / 2; i++, frequency *= 0.84375f) inv_freq[i] = frequency;
        ropes[r] = (llmrt_rope){inv_freq, rotary_dim, (int)below(2), r ? 1.0625f : 1.0f, 0};
    }
}

static llmrt_program make_program(const kind *k, int head_dim) {
    int64_t most = head_dim >= 128 ? 2 : 4, kv_heads = between(1, most > 2 ? 3 : most);
    int64_t group = between(1, most) * (head_dim == 16 ? between(1, 8) : 1);
    if (kv_heads * group * head_dim % 32) group *= 2;
    llmrt_program p = {.ops = ops, .widths = widths, .ropes = ropes};
    p.num_buffers = NUM_BUFFERS;
    p.num_ropes = 2;
    p.num_layers = between(1, MAX_LAYERS);
    p.num_heads = kv_heads * group;
    p.num_kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.kv_format = k->kv_format;
    p.vocab_size = between(33, 300);
    p.max_context = MAX_CONTEXT;
    widths[RESIDUAL] = widths[UNNORMED] = 32 * between(2, 5);
    widths[GATED] = 32 * between(1, 6);
    widths[ATTENDED] = p.num_heads * head_dim;
    widths[QKV] = widths[ATTENDED] + 2 * kv_heads * head_dim;
    make_ropes(head_dim);
    llmrt_op *op = add(&p, LLMRT_OP_EMBED, 0, RESIDUAL);
    op->weight = embedding(k, p.vocab_size, widths[RESIDUAL]);
    op->scale = one_in(2) ? 8.0f : 1.0f;
    for (int i = 0; i < p.num_layers; i++) add_layer(&p, k, i);
    float *norm = vector(widths[RESIDUAL], 1.0f, 0.25f);
    add_linear(&p, k, RESIDUAL, LLMRT_OUT_LOGITS, p.vocab_size, norm);
    return p;
}

/* ---- steps ---- */

typedef struct {
    uint32_t table[MAX_TABLE]; /* entries that it does not reach yet are no blocks */
    int arena;
    int64_t length, longest;
} sequence;

static void make_sequences(sequence *s) {
    static const int64_t LONGEST[NUM_SEQUENCES] = {640, 33, 300, 64, 150, 90, 400};
    uint32_t next[2] = {0, 0};
    for (int i = 0; i < NUM_SEQUENCES; i++) {
        s[i] = (sequence){.arena = i % 2, .length = 0, .longest = LONGEST[i]};
        memset(s[i].table, 0xff, sizeof s[i].table);
        for (int64_t b = 0; b < (LONGEST[i] + 31) / 32; b++)
            s[i].table[b] = next[i % 2]++ * 37 % NUM_BLOCKS;
    }
    /* The last one begins with blocks of the first, which it only reads. */
    memcpy(s[NUM_SEQUENCES - 1].table, s[0].table, 8 * sizeof *s[0].table);
}

/* Tokens that a sequence computes in a step; 0: it is not in the batch. */
static int64_t chunk(const sequence *all, int i, int step) {
    const sequence *s = &all[i];
    int64_t room = s->longest - s->length - 4, size = 0;
    if (step >= NUM_STEPS - 2) return i ? 0 : step == NUM_STEPS - 1 ? 1 : 3;
    if (i == NUM_SEQUENCES - 1 && all[0].length < 256) return 0;
    if (i == 0 && step < 4) return MAX_CHUNK;
    switch (below(4)) {
    case 0: size = 1; break;
    case 1: size = between(2, 6); break;
    case 2: size = between(1, MAX_CHUNK); break;
    default: size = step ? 1 : 0;
    }
    return size < room ? size : room > 0 ? room : 0;
}

typedef struct {
    uint64_t logits, kv, best;
} hashes;

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9fb21c651e98df25u;
    return hash ^ hash >> 32;
}

static uint64_t hash_floats(uint64_t hash, const void *data, int64_t count) {
    const uint8_t *bytes = data;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, bytes + 4 * i, 4);
        hash = mix(hash, (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : bits);
    }
    return hash;
}

static uint64_t hash_kv(const llmrt_program *p, const uint8_t *arena) {
    int64_t count = 2 * p->head_dim * 32, is_scaled = p->kv_format >= LLMRT_KV_INT8;
    int64_t size = p->kv_format == LLMRT_KV_F32 ? 4 : p->kv_format == LLMRT_KV_BF16 ? 2 : 1;
    uint64_t hash = 3;
    for (int64_t i = 0; i < NUM_BLOCKS * p->num_layers * p->num_kv_heads; i++) {
        if (size == 4) hash = hash_floats(hash, arena, count);
        for (int64_t j = 0; j < count && size == 2; j++) {
            uint16_t bits;
            memcpy(&bits, arena + 2 * j, 2);
            hash = mix(hash, (bits & 0x7fff) > 0x7f80 ? 0x7fc0 : bits);
        }
        for (int64_t j = 0; j < count && size == 1; j += 8) {
            uint64_t bytes;
            memcpy(&bytes, arena + j, 8);
            hash = mix(hash, bytes);
        }
        arena += count * size;
        if (is_scaled) hash = hash_floats(hash, arena, 64);
        arena += is_scaled ? 64 * 4 : 0;
    }
    return hash;
}

static void run_step(llmrt_engine *engine, const llmrt_program *p, sequence *sequences,
                     uint8_t *const *arenas, int step, hashes *h) {
    static uint32_t tokens[NUM_SEQUENCES * MAX_CHUNK];
    llmrt_row rows[NUM_SEQUENCES];
    int64_t num_rows = 0, num_tokens = 0, num_logits = 0, bad;
    for (int i = 0; i < NUM_SEQUENCES; i++) {
        sequence *s = &sequences[i];
        int64_t count = chunk(sequences, i, step);
        if (!count) continue;
        if (i == NUM_SEQUENCES - 1 && !s->length) s->length = 256;
        int64_t wanted = one_in(4) ? 0 : one_in(4) ? between(1, count) : 1;
        rows[num_rows++] = (llmrt_row){arenas[s->arena], NUM_BLOCKS, s->table, MAX_TABLE,
                                       s->length, count, wanted};
        for (int64_t j = 0; j < count; j++)
            tokens[num_tokens++] = (uint32_t)below(p->vocab_size);
        num_logits += wanted;
        s->length += count;
    }
    /* Exactly as large as is wanted, so that a sanitizer sees a write beyond. */
    float *logits = malloc((size_t)(num_logits * p->vocab_size) * 4 + 1);
    int32_t *best = malloc((size_t)num_logits * 4 + 1);
    llmrt_batch batch = {num_rows, rows, tokens, logits, best};
    int error = llmrt_step(engine, &batch, &bad);
    if (error) {
        printf("step %d: error %d of row %" PRId64 "\n", step, error, bad);
        exit(1);
    }
    h->logits = hash_floats(h->logits, logits, num_logits * p->vocab_size);
    for (int64_t i = 0; i < num_logits; i++) h->best = mix(h->best, (uint32_t)best[i]);
    free(logits);
    free(best);
}

static hashes run_steps(const llmrt_program *p, int family, int num_threads, uint64_t seed) {
    llmrt_engine *engine = llmrt_engine_new(p, family, num_threads);
    int64_t bytes = NUM_BLOCKS * llmrt_block_bytes(p);
    uint8_t *arenas[2] = {aligned_alloc(64, (size_t)bytes), aligned_alloc(64, (size_t)bytes)};
    if (!engine || !arenas[0] || !arenas[1]) abort();
    for (int i = 0; i < 2; i++) memset(arenas[i], 0xff, (size_t)bytes); /* NaN */
    sequence sequences[NUM_SEQUENCES];
    make_sequences(sequences);
    hashes h = {1, 0, 2};
    state = seed;
    for (int step = 0; step < NUM_STEPS; step++) run_step(engine, p, sequences, arenas, step, &h);
    h.kv = mix(hash_kv(p, arenas[0]), hash_kv(p, arenas[1]));
    for (int i = 0; i < 2; i++) free(arenas[i]);
    llmrt_engine_free(engine);
    return h;
}

/* ---- cases ---- */

/* Thirty-six cases in a row have every pair of weight format and head size, and four times that
 * every KV format with each of these pairs. */
static int run_case(int number, int family, const char *threads) {
    kind k = {.format = number % 6, .kv_format = (number + number / 6 + number / 36) % 4};
    k.is_extreme = number % 7 == 3;
    k.is_spoilt = number % 7 == 5;
    state = (uint64_t)number;
    int head_dim = HEAD_SIZES[(number + number / 6) % 6];
    llmrt_program p = make_program(&k, head_dim);
    hashes first = {0, 0, 0};
    int is_same = 1;
    for (const char *next = threads; next; next = strchr(next, ',')) {
        next += *next == ',';
        hashes h = run_steps(&p, family, atoi(next), (uint64_t)number << 32);
        if (next == threads) first = h;
        if (!memcmp(&h, &first, sizeof h)) continue;
        printf("%s threads differ in logits=%016" PRIx64 " kv=%016" PRIx64 " best=%016" PRIx64 ":\n",
               next, h.logits, h.kv, h.best);
        is_same = 0;
    }
    printf("%d %s kv-%s head=%d heads=%d/%d hidden=%d vocab=%d%s%s logits=%016" PRIx64
           " kv=%016" PRIx64 " best=%016" PRIx64 "\n",
           number, FORMATS[k.format], KV_FORMATS[k.kv_format], head_dim, (int)p.num_heads,
           (int)p.num_kv_heads, (int)widths[RESIDUAL], (int)p.vocab_size,
           k.is_extreme ? " extreme" : "", k.is_spoilt ? " spoilt" : "", first.logits, first.kv,
           first.best);
    fflush(stdout);
    release();
    return is_same;
}

int main(int argc, char **argv) {
    const char *name;
    if (argc != 5) {
        fprintf(stderr, "usage: %s FAMILY THREADS[,THREADS...] FIRST_CASE END_CASE\n", argv[0]);
        return 2;
    }
    for (int family = 0; (name = llmrt_family_name(family)); family++) {
        if (strcmp(name, argv[1])) continue;
        if (!llmrt_family_supported(family)) break;
        int is_same = 1;
        for (int i = atoi(argv[3]); i < atoi(argv[4]); i++) is_same &= run_case(i, family, argv[2]);
        return !is_same;
    }
    fprintf(stderr, "family %s: not for this CPU\n", argv[1]);
    return 2;
}
