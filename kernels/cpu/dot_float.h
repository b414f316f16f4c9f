/* A strip of float weights times tokens: columns in order, even and odd ones summed apart. */

INLINE void strip_float(const int format, const int num_tokens, const uint8_t *w,
                        const prepared *in, int64_t token, int64_t columns, strip_result *y) {
    vf even[TILE_TOKENS], odd[TILE_TOKENS];
    UNROLL
    for (int t = 0; t < num_tokens; t++) even[t] = odd[t] = vf_zero();
    const float *x = in->x + token * columns;
    for (int64_t c = 0; c < columns; c += 2) {
        vf w0, w1;
        if (format == LLMRT_BF16) {
            w0 = vf_load_bf16((const uint16_t *)w + 16 * c);
            w1 = vf_load_bf16((const uint16_t *)w + 16 * c + 16);
        } else {
            w0 = vf_load((const float *)w + 16 * c);
            w1 = vf_load((const float *)w + 16 * c + 16);
        }
        UNROLL
        for (int t = 0; t < num_tokens; t++) {
            even[t] = vf_fma(vf_set1(x[t * columns + c]), w0, even[t]);
            odd[t] = vf_fma(vf_set1(x[t * columns + c + 1]), w1, odd[t]);
        }
    }
    UNROLL
    for (int t = 0; t < num_tokens; t++) vf_store(y[t], vf_add(even[t], odd[t]));
}
