/* Rows of the embedding, taken out of their packed strips; and the highest logit. */

static float f16_value(const uint8_t *p) {
    float lanes[16];
    uint16_t halves[16] = {0};
    memcpy(halves, p, sizeof *halves);
    vf_store(lanes, vf_load_f16(halves));
    return lanes[0];
}

/* Group `w` of a strip, row `lane`: 32 floats. */
static void unpack_row(int64_t format, const uint8_t *w, int64_t lane, float *out) {
    if (format >= LLMRT_BF16) {
        for (int c = 0; c < LLMRT_GROUP; c++) {
            if (format == LLMRT_F32) {
                memcpy(out + c, w + 4 * (16 * c + lane), sizeof *out);
            } else {
                uint16_t half;
                memcpy(&half, w + 2 * (16 * c + lane), sizeof half);
                uint32_t bits = (uint32_t)half << 16;
                memcpy(out + c, &bits, sizeof bits);
            }
        }
        return;
    }
    int is_4bit = format <= LLMRT_Q4M;
    const uint8_t *scales = w + weight_bytes(format) + 2 * lane;
    float d = f16_value(scales), m = has_minimum(format) ? f16_value(scales + 32) : 0.0f;
    if (format == LLMRT_Q4) m = -8.0f * d;
    for (int c = 0; c < LLMRT_GROUP; c++) {
        int quad = c / 4, q;
        if (is_4bit) {
            int byte = w[64 * (quad / 2) + 4 * lane + c % 4];
            q = quad % 2 ? byte >> 4 : byte & 15;
        } else {
            q = (int8_t)w[64 * quad + 4 * lane + c % 4];
        }
        out[c] = (float)q * d + m;
    }
}

static void embed(llmrt_engine *engine, const llmrt_op *op, atomic_long *work) {
    const llmrt_weight *weight = op->weight;
    const int64_t bytes = strip_bytes(weight->columns, weight->format);
    const int64_t groups = weight->columns / LLMRT_GROUP, width = engine->program->widths[op->out];
    for (int64_t token; (token = take(work, 1)) < engine->num_tokens;) {
        int64_t id = engine->batch->tokens[token];
        const uint8_t *w = weight->data + id / LLMRT_STRIP * bytes;
        float *out = engine->buffers[op->out] + token * width;
        for (int64_t g = 0; g < groups; g++)
            unpack_row(weight->format, w + g * group_bytes(weight->format), id % LLMRT_STRIP,
                       out + LLMRT_GROUP * g);
        for (int64_t i = 0; i < weight->columns; i++) out[i] *= op->scale;
    }
}

/* The highest logit of each row, the lowest id among equals; -1 if one is not finite. */
static void best(llmrt_engine *engine, atomic_long *work) {
    const int64_t size = engine->program->vocab_size;
    for (int64_t row; (row = take(work, 1)) < engine->num_wanted;) {
        const float *logits = engine->batch->logits + row * size;
        vf highest = vf_set1(-INFINITY), spoilt = vf_zero();
        int64_t i = 0;
        for (; i + 16 <= size; i += 16) {
            vf x = vf_load(logits + i);
            highest = vf_max(highest, x);
            spoilt = vf_fma(x, vf_zero(), spoilt); /* 0, or NaN */
        }
        float top = vf_highest(highest), sum = vf_sum(spoilt);
        for (; i < size; i++) {
            top = logits[i] > top ? logits[i] : top;
            sum += logits[i] * 0.0f;
        }
        int64_t id = 0;
        while (sum == 0.0f && logits[id] != top) id++;
        engine->batch->best[row] = sum == 0.0f ? (int32_t)id : -1;
    }
}
