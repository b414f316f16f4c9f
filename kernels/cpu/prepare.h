/* Inputs of products: normed, and quantized where the weight is. */

/* Symmetric, to the largest of a group of 32: q = round(x * 127 / max), x = q * max / 127. A group
 * that has an infinity or a NaN is NaN; one below 2**-100 is 0: 127 / max must be finite. */
static void quantize(const float *x, int64_t columns, int8_t *q, int32_t *sum, float *scale,
                     float *scaled_sum) {
    for (int64_t g = 0; g < columns / LLMRT_GROUP; g++) {
        vf a = vf_load(x + 32 * g), b = vf_load(x + 32 * g + 16);
        float highest = vf_highest(vf_max(vf_abs(a), vf_abs(b)));
        float spoilt = vf_sum(vf_fma(a, vf_zero(), vf_mul(b, vf_zero()))); /* 0, or NaN */
        if (!(highest >= 0x1p-100f && spoilt == 0.0f)) {
            memset(q + 32 * g, 0, 32);
            sum[g] = 0;
            scale[g] = scaled_sum[g] = spoilt;
            continue;
        }
        vf inverse = vf_set1(127.0f / highest);
        vi qa = vi_round(vf_mul(a, inverse)), qb = vi_round(vf_mul(b, inverse));
        vi_store_i8(q + 32 * g, qa);
        vi_store_i8(q + 32 * g + 16, qb);
        sum[g] = vi_sum(qa, qb);
        scale[g] = highest / 127.0f;
        scaled_sum[g] = scale[g] * (float)sum[g];
    }
}

/* Token `token` of the op's input, as place `place` of `out`. */
static void prepare_token(const llmrt_engine *engine, const llmrt_op *op, int64_t token,
                          const prepared *out, int64_t place) {
    int64_t columns = op->weight->columns, groups = columns / LLMRT_GROUP;
    const float *x = engine->buffers[op->in] + token * engine->program->widths[op->in];
    float *ready = out->x + place * columns;
    int is_float = op->weight->format >= LLMRT_BF16;
    if (op->norm) {
        norm(x, op->norm, columns, op->eps, ready);
        x = ready;
    } else if (is_float) {
        memcpy(ready, x, (size_t)columns * sizeof *x);
    }
    if (!is_float)
        quantize(x, columns, out->q + place * columns, out->sum + place * groups,
                 out->scale + place * groups, out->scaled_sum + place * groups);
}

static void prepare(llmrt_engine *engine, const llmrt_op *op, int thread, atomic_long *work) {
    int64_t total = num_inputs(engine, op);
    int is_head = op->out == LLMRT_OUT_LOGITS;
    if (is_private(total)) {
        for (int64_t i = 0; i < total; i++)
            prepare_token(engine, op, is_head ? engine->wanted[i] : i, &engine->own[thread], i);
        return;
    }
    int64_t size = piece(total, engine->num_threads);
    for (int64_t begin; (begin = take(work, size)) < total;)
        for (int64_t i = begin; i < begin + size && i < total; i++)
            prepare_token(engine, op, is_head ? engine->wanted[i] : i, &engine->shared, i);
}

static void add_norm(llmrt_engine *engine, const llmrt_op *op, atomic_long *work) {
    const int64_t *widths = engine->program->widths;
    int64_t size = widths[op->in];
    for (int64_t token; (token = take(work, 1)) < engine->num_tokens;) {
        float *x = engine->buffers[op->in] + token * size;
        float *out = engine->buffers[op->out] + token * widths[op->out];
        norm(x, op->norm, size, op->eps, x);
        for (int64_t i = 0; i < size; i += 16)
            vf_store(out + i, vf_add(vf_load(out + i), vf_load(x + i)));
    }
}
