/* A strip times tokens in plain C. */

#define TILE_TOKENS 4

/* The weights of a group as bytes [8 quads][16 rows][4]. */
INLINE void unpack_group(const int format, const uint8_t *w, int8_t *q) {
    if (format > LLMRT_Q4M) {
        memcpy(q, w, 512);
        return;
    }
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 64; i++) {
            q[128 * j + i] = (int8_t)(w[64 * j + i] & 15);
            q[128 * j + 64 + i] = (int8_t)(w[64 * j + i] >> 4);
        }
}

INLINE void strip_int(const int format, const int num_tokens, const uint8_t *w,
                      const prepared *in, int64_t token, int64_t columns, strip_result *y) {
    const int q_bytes = weight_bytes(format), stride = group_bytes(format);
    const int64_t groups = columns / LLMRT_GROUP;
    vf f[TILE_TOKENS];
    for (int t = 0; t < num_tokens; t++) f[t] = vf_zero();
    for (int64_t g = 0; g < groups; g++, w += stride) {
        int8_t q[512];
        unpack_group(format, w, q);
        vf d = vf_load_f16((const uint16_t *)(w + q_bytes));
        vf m = format == LLMRT_Q4 ? vf_mul(d, vf_set1(-8.0f)) : d;
        if (has_minimum(format)) m = vf_load_f16((const uint16_t *)(w + q_bytes + 32));
        for (int t = 0; t < num_tokens; t++) {
            const int8_t *x = in->q + (token + t) * columns + LLMRT_GROUP * g;
            vi a = {{0}};
            for (int quad = 0; quad < 8; quad++)
                for (int row = 0; row < 16; row++) {
                    const int8_t *qr = q + 64 * quad + 4 * row, *xr = x + 4 * quad;
                    a.v[row] += qr[0] * xr[0] + qr[1] * xr[1] + qr[2] * xr[2] + qr[3] * xr[3];
                }
            int64_t place = (token + t) * groups + g;
            f[t] = vf_fma(vf_from_vi(a), vf_mul(d, vf_set1(in->scale[place])), f[t]);
            if (format != LLMRT_Q8) f[t] = vf_fma(m, vf_set1(in->scaled_sum[place]), f[t]);
        }
    }
    for (int t = 0; t < num_tokens; t++) vf_store(y[t], f[t]);
}

#include "dot_float.h"
