/* Batches that must be refused, with nothing written, and an engine that goes on after them; and
 * a fork, whose child has no threads but the one that made it. Prints what is wrong; ends with 1.
 * hostile FAMILY THREADS */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "abi.h"

enum { VOCAB = 35, COLUMNS = 96, MAX_CONTEXT = 512, NUM_BLOCKS = 4 };

static int num_faults;

static void expect(const char *what, int64_t found, int64_t expected) {
    if (found == expected) return;
    printf("%s: %" PRId64 " in place of %" PRId64 "\n", what, found, expected);
    num_faults++;
}

static float logits[4 * VOCAB];
static int32_t best[4];
static uint32_t tokens[MAX_CONTEXT], blocks[NUM_BLOCKS] = {3, 1, 0, 2};

static int step(llmrt_engine *engine, const llmrt_row *rows, int64_t num_rows, int64_t *bad) {
    llmrt_batch batch = {num_rows, rows, tokens, logits, best};
    memset(logits, 0, sizeof logits);
    best[0] = -7;
    return llmrt_step(engine, &batch, bad);
}

static void check_refused(llmrt_engine *engine, const llmrt_row *good, int64_t arena_bytes) {
    const int64_t most = INT64_MAX;
    struct {
        const char *what;
        int error;
        int64_t start, num_tokens, num_table, num_logits, num_blocks;
    } cases[] = {
        {"no token", LLMRT_BAD_RANGE, 0, 0, 4, 0, 4},
        {"fewer than no tokens", LLMRT_BAD_RANGE, 9, -1, 4, 0, 4},
        {"the fewest tokens", LLMRT_BAD_RANGE, 9, INT64_MIN, 4, 0, 4},
        {"a start below 0", LLMRT_BAD_RANGE, -1, 2, 4, 1, 4},
        {"the lowest start", LLMRT_BAD_RANGE, INT64_MIN, 1, 4, 1, 4},
        {"the highest start", LLMRT_BAD_RANGE, most, 1, 4, 1, 4},
        {"a start whose end is no number", LLMRT_BAD_RANGE, most - 3, 5, 4, 1, 4},
        {"the most tokens", LLMRT_BAD_RANGE, 1, most, 4, 1, 4},
        {"a token past the context", LLMRT_BAD_RANGE, MAX_CONTEXT, 1, 4, 1, 4},
        {"a token past the table", LLMRT_BAD_TABLE, 128, 1, 4, 1, 4},
        {"no table", LLMRT_BAD_TABLE, 0, 1, 0, 1, 4},
        {"a table below 0", LLMRT_BAD_TABLE, 0, 1, INT64_MIN, 1, 4},
        {"a block past the arena", LLMRT_BAD_BLOCK, 0, 1, 4, 1, 3},
        {"an arena below 0", LLMRT_BAD_BLOCK, 0, 1, 4, 1, INT64_MIN},
        {"logits below 0", LLMRT_BAD_LOGITS, 0, 2, 4, -1, 4},
        {"more logits than tokens", LLMRT_BAD_LOGITS, 0, 2, 4, 3, 4},
    };
    uint8_t *before = malloc((size_t)arena_bytes);
    if (!before) abort();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        llmrt_row rows[2] = {*good, *good};
        int64_t bad = -1;
        rows[1].start = cases[i].start;
        rows[1].num_tokens = cases[i].num_tokens;
        rows[1].num_table = cases[i].num_table;
        rows[1].num_logits = cases[i].num_logits;
        rows[1].num_blocks = cases[i].num_blocks;
        memcpy(before, good->arena, (size_t)arena_bytes);
        expect(cases[i].what, step(engine, rows, 2, &bad), cases[i].error);
        expect(cases[i].what, bad, 1);
        expect("a KV byte written", memcmp(before, good->arena, (size_t)arena_bytes), 0);
        expect("a token chosen", best[0], -7);
    }
    int64_t bad;
    tokens[3] = VOCAB;
    expect("a token past the vocabulary", step(engine, good, 1, &bad), LLMRT_BAD_TOKEN);
    tokens[3] = 3;
    expect("no rows", step(engine, good, 0, &bad), LLMRT_OK);
    expect("fewer than no rows", step(engine, good, INT64_MIN, &bad), LLMRT_OK);
    free(before);
}

static void check_works(llmrt_engine *engine, const llmrt_row *good, const float *expected) {
    int64_t bad;
    expect("a good step", step(engine, good, 1, &bad), LLMRT_OK);
    expect("its logits", memcmp(logits, expected, VOCAB * sizeof *logits), 0);
}

/* The child computes alone and frees the engine; it must not wait for threads it has not. */
static void check_fork(llmrt_engine *engine, const llmrt_row *good, const float *expected) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        num_faults = 0;
        alarm(20);
        check_works(engine, good, expected);
        llmrt_engine_free(engine);
        fflush(stdout);
        _exit(num_faults);
    }
    waitpid(child, &status, 0);
    expect("the status of a fork", status, 0);
}

static llmrt_weight *weight(int64_t rows) {
    static llmrt_weight made[2];
    llmrt_weight *next = &made[made[0].data != NULL];
    int64_t size = llmrt_packed_bytes(rows, COLUMNS, LLMRT_F32);
    float *values = aligned_alloc(64, (size_t)size);
    if (!values) abort();
    for (int64_t i = 0; i < size / 4; i++) values[i] = (float)(i * 37 % 101 - 50) * 0x1p-7f;
    *next = (llmrt_weight){(rows + 15) / 16 * 16, COLUMNS, LLMRT_F32, (uint8_t *)values};
    return next;
}

int main(int argc, char **argv) {
    static const int64_t WIDTHS[] = {COLUMNS, COLUMNS};
    static const float INV_FREQ[16] = {1.0f, 0.5f, 0.25f};
    static const llmrt_rope ROPE = {INV_FREQ, 32, 0, 1.0f, 0};
    llmrt_weight *qkv = weight(COLUMNS), *head = weight(VOCAB);
    llmrt_op ops[] = {
        {.kind = LLMRT_OP_EMBED, .weight = head, .scale = 1.0f},
        {.kind = LLMRT_OP_LINEAR, .out = 1, .weight = qkv},
        {.kind = LLMRT_OP_ROPE, .in = 1},
        {.kind = LLMRT_OP_ATTEND, .in = 1, .out = 0, .scale = 0.25f, .window = INT64_MAX},
        {.kind = LLMRT_OP_LINEAR, .out = LLMRT_OUT_LOGITS, .weight = head},
    };
    llmrt_program program = {5, ops, 2, WIDTHS, 1, &ROPE, 1, 1, 1, 32, LLMRT_KV_INT8, VOCAB,
                             MAX_CONTEXT};
    int family = 0, num_threads = argc == 3 ? atoi(argv[2]) : 0;
    while (argc == 3 && llmrt_family_name(family) && strcmp(llmrt_family_name(family), argv[1]))
        family++;
    llmrt_engine *engine = llmrt_engine_new(&program, family, num_threads);
    if (!engine) {
        fprintf(stderr, "usage: %s FAMILY THREADS, of this CPU\n", argv[0]);
        return 2;
    }
    int64_t bytes = NUM_BLOCKS * llmrt_block_bytes(&program), bad;
    uint8_t *arena = malloc((size_t)bytes);
    if (!arena) abort();
    memset(arena, 0xff, (size_t)bytes);
    for (int i = 0; i < MAX_CONTEXT; i++) tokens[i] = (uint32_t)i % VOCAB;
    llmrt_row good = {arena, NUM_BLOCKS, blocks, NUM_BLOCKS, 0, 70, 1};
    float expected[VOCAB];
    expect("the first step", step(engine, &good, 1, &bad), LLMRT_OK);
    memcpy(expected, logits, sizeof expected);
    check_refused(engine, &good, bytes);
    check_works(engine, &good, expected);
    check_fork(engine, &good, expected);
    check_works(engine, &good, expected);
    llmrt_engine_free(engine);
    free(arena);
    free((void *)(uintptr_t)qkv->data);
    free((void *)(uintptr_t)head->data);
    return num_faults > 0;
}
