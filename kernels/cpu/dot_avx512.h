/* A strip times tokens with AVX-512 VNNI: all 16 rows in one register. */

#define TILE_TOKENS 8

INLINE __m512i broadcast4(const int8_t *p) {
    int32_t quad;
    memcpy(&quad, p, sizeof quad);
    return _mm512_set1_epi32(quad);
}

/* Exact sums of a group: a[t] = sum over 32 columns of q * x, for 16 rows at `w`. The product
 * takes unsigned weights: 8-bit ones are moved up by 128, of which `sum` takes the part out. */
INLINE void group_dot(const int format, const int num_tokens, const uint8_t *w, const int8_t *x,
                      const int32_t *sum, int64_t columns, __m512i *a) {
    const __m512i low = _mm512_set1_epi8(15), top = _mm512_set1_epi8((char)0x80);
    const int64_t groups = columns / LLMRT_GROUP;
    __m512i even[TILE_TOKENS], odd[TILE_TOKENS];
    UNROLL
    for (int t = 0; t < num_tokens; t++) {
        even[t] = format <= LLMRT_Q4M ? _mm512_setzero_si512()
                                      : _mm512_set1_epi32(-128 * sum[t * groups]);
        odd[t] = _mm512_setzero_si512();
    }
    UNROLL
    for (int j = 0; j < 4; j++) {
        __m512i q0, q1;
        if (format <= LLMRT_Q4M) {
            __m512i v = _mm512_loadu_si512(w + 64 * j);
            q0 = _mm512_and_si512(v, low);
            q1 = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
        } else {
            q0 = _mm512_xor_si512(_mm512_loadu_si512(w + 128 * j), top);
            q1 = _mm512_xor_si512(_mm512_loadu_si512(w + 128 * j + 64), top);
        }
        UNROLL
        for (int t = 0; t < num_tokens; t++) {
            const int8_t *xt = x + t * columns + 8 * j;
            even[t] = _mm512_dpbusd_epi32(even[t], q0, broadcast4(xt));
            odd[t] = _mm512_dpbusd_epi32(odd[t], q1, broadcast4(xt + 4));
        }
    }
    UNROLL
    for (int t = 0; t < num_tokens; t++) a[t] = _mm512_add_epi32(even[t], odd[t]);
}

INLINE void strip_int(const int format, const int num_tokens, const uint8_t *w,
                      const prepared *in, int64_t token, int64_t columns, strip_result *y) {
    const int q_bytes = weight_bytes(format), stride = group_bytes(format);
    const int64_t groups = columns / LLMRT_GROUP;
    __m512 f[TILE_TOKENS];
    UNROLL
    for (int t = 0; t < num_tokens; t++) f[t] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++, w += stride) {
        for (int ahead = 0; ahead < stride && num_tokens == 1; ahead += 64)
            __builtin_prefetch(w + 4 * stride + ahead);
        __m512i a[TILE_TOKENS];
        int64_t first = token * groups + g;
        group_dot(format, num_tokens, w, in->q + token * columns + LLMRT_GROUP * g,
                  in->sum + first, columns, a);
        __m512 d = vf_load_f16((const uint16_t *)(w + q_bytes));
        __m512 m = format == LLMRT_Q4 ? _mm512_mul_ps(d, _mm512_set1_ps(-8.0f)) : d;
        if (has_minimum(format)) m = vf_load_f16((const uint16_t *)(w + q_bytes + 32));
        UNROLL
        for (int t = 0; t < num_tokens; t++) {
            int64_t place = first + t * groups;
            __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(in->scale[place]));
            f[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[t]), scale, f[t]);
            if (format != LLMRT_Q8)
                f[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(in->scaled_sum[place]), f[t]);
        }
    }
    UNROLL
    for (int t = 0; t < num_tokens; t++) _mm512_storeu_ps(y[t], f[t]);
}

#include "dot_float.h"
