/* Query and key of new tokens: normed, rotated; key and value stored in their block.
 *
 * A buffer of the op holds, per token, the query heads, then the key heads, then the value heads.
 */

static void rotate(const llmrt_rope *rope, const float *angles, float *x) {
    const int half = rope->rotary_dim / 2;
    const float *cosine = angles, *sine = angles + half;
    if (rope->is_interleaved) {
        for (int i = 0; i < half; i++) {
            float first = x[2 * i], second = x[2 * i + 1];
            x[2 * i] = first * cosine[i] - second * sine[i];
            x[2 * i + 1] = second * cosine[i] + first * sine[i];
        }
        return;
    }
    for (int i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cosine[i] - second * sine[i];
        x[i + half] = second * cosine[i] + first * sine[i];
    }
}

static void rope_head(const llmrt_engine *engine, const llmrt_op *op, const span *part,
                      int64_t head) {
    const llmrt_program *program = engine->program;
    const llmrt_rope *rope = &program->ropes[op->rope];
    const int64_t size = program->head_dim, format = program->kv_format;
    const int64_t num_kv = program->num_kv_heads, group = program->num_heads / num_kv;
    const int64_t width = program->widths[op->in];
    uint8_t *keys = head_of_block(program, &engine->batch->rows[part->row], part->block,
                                  op->layer, head);
    uint8_t *values = keys + size * LLMRT_BLOCK_TOKENS * kv_element_bytes(format);
    float *scales = (float *)(values + size * LLMRT_BLOCK_TOKENS * kv_element_bytes(format));
    for (int64_t token = part->token; token < part->token + part->num_tokens; token++) {
        int64_t slot = engine->positions[token] % LLMRT_BLOCK_TOKENS;
        const float *angles = engine->angles[op->rope] + token * rope->rotary_dim;
        float *x = engine->buffers[op->in] + token * width;
        for (int64_t i = 0; i < group; i++) {
            float *q = x + (head * group + i) * size;
            if (op->q_norm) norm(q, op->q_norm, size, op->eps, q);
            rotate(rope, angles, q);
        }
        float *k = x + (program->num_heads + head) * size, *v = k + num_kv * size;
        if (op->k_norm) norm(k, op->k_norm, size, op->eps, k);
        rotate(rope, angles, k);
        store_head(format, k, size, keys, slot, LLMRT_BLOCK_TOKENS, scales + slot);
        store_head(format, v, size, values, slot * size, 1,
                   scales + LLMRT_BLOCK_TOKENS + slot);
    }
}

static void rope(llmrt_engine *engine, const llmrt_op *op, atomic_long *work) {
    int64_t num_kv = engine->program->num_kv_heads, total = engine->num_spans * num_kv;
    for (int64_t i; (i = take(work, 1)) < total;)
        rope_head(engine, op, &engine->spans[i / num_kv], i % num_kv);
}
