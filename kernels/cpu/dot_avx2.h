/* A strip times tokens with AVX2: rows 0-7 and 8-15 in a register each.
 *
 * 4-bit weights: the sums of two products of up to 15 * 127 each fit eight times into int16, so
 * a group of 32 columns is added up in int16 and widened once.
 */

#define TILE_TOKENS 4

INLINE __m256i broadcast4(const int8_t *p) {
    int32_t quad;
    memcpy(&quad, p, sizeof quad);
    return _mm256_set1_epi32(quad);
}

/* Keeps the compiler from adding in another order, for which it would need more registers. */
#define IN_ORDER(x) __asm__("" : "+x"(x))

/* Exact sums of a group: a[h][t] = sum over 32 columns of q * x, for 8 rows each at `w` and,
 * if there are two halves, 32 bytes on. */
INLINE void group_dot(const int format, const int num_tokens, const int num_halves,
                      const uint8_t *w, const int8_t *x, int64_t columns,
                      __m256i a[2][TILE_TOKENS]) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    if (format <= LLMRT_Q4M) {
        UNROLL
        for (int j = 0; j < 8; j++) {
            __m256i q[2];
            UNROLL
            for (int h = 0; h < num_halves; h++) {
                q[h] = _mm256_loadu_si256((const __m256i *)(w + 64 * (j / 2) + 32 * h));
                if (j % 2) q[h] = _mm256_srli_epi16(q[h], 4);
                q[h] = _mm256_and_si256(q[h], low);
            }
            UNROLL
            for (int t = 0; t < num_tokens; t++) {
                __m256i xt = broadcast4(x + t * columns + 4 * j);
                UNROLL
                for (int h = 0; h < num_halves; h++) {
                    __m256i pairs = _mm256_maddubs_epi16(q[h], xt);
                    a[h][t] = j ? _mm256_add_epi16(a[h][t], pairs) : pairs;
                    IN_ORDER(a[h][t]);
                }
            }
        }
        UNROLL
        for (int h = 0; h < num_halves; h++)
            UNROLL
            for (int t = 0; t < num_tokens; t++) a[h][t] = _mm256_madd_epi16(a[h][t], ones);
        return;
    }
    UNROLL
    for (int j = 0; j < 8; j++)
        UNROLL
        for (int h = 0; h < num_halves; h++) {
            __m256i q = _mm256_loadu_si256((const __m256i *)(w + 64 * j + 32 * h));
            __m256i magnitude = _mm256_abs_epi8(q);
            UNROLL
            for (int t = 0; t < num_tokens; t++) {
                __m256i signed_x = _mm256_sign_epi8(broadcast4(x + t * columns + 4 * j), q);
                __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signed_x), ones);
                a[h][t] = j ? _mm256_add_epi32(a[h][t], sums) : sums;
                IN_ORDER(a[h][t]);
            }
        }
}

/* Rows 8 * half on, of num_halves halves. */
INLINE void strip_halves(const int format, const int num_tokens, const int half,
                         const int num_halves, const uint8_t *w, const prepared *in,
                         int64_t token, int64_t columns, strip_result *y) {
    const int q_bytes = weight_bytes(format), stride = group_bytes(format);
    const int64_t groups = columns / LLMRT_GROUP;
    __m256 f[2][TILE_TOKENS];
    UNROLL
    for (int h = 0; h < num_halves; h++)
        UNROLL
        for (int t = 0; t < num_tokens; t++) f[h][t] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++, w += stride) {
        for (int ahead = 0; ahead < stride && num_tokens == 1; ahead += 64)
            __builtin_prefetch(w + 4 * stride + ahead);
        __m256i a[2][TILE_TOKENS];
        group_dot(format, num_tokens, num_halves, w + 32 * half,
                  in->q + token * columns + LLMRT_GROUP * g, columns, a);
        UNROLL
        for (int h = 0; h < num_halves; h++) {
            const uint8_t *scales = w + q_bytes + 16 * (half + h);
            __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales));
            __m256 m = format == LLMRT_Q4 ? _mm256_mul_ps(d, _mm256_set1_ps(-8.0f)) : d;
            if (has_minimum(format))
                m = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + 32)));
            UNROLL
            for (int t = 0; t < num_tokens; t++) {
                int64_t place = (token + t) * groups + g;
                __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(in->scale[place]));
                f[h][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(a[h][t]), scale, f[h][t]);
                if (format != LLMRT_Q8)
                    f[h][t] = _mm256_fmadd_ps(m, _mm256_set1_ps(in->scaled_sum[place]), f[h][t]);
            }
        }
    }
    UNROLL
    for (int h = 0; h < num_halves; h++)
        UNROLL
        for (int t = 0; t < num_tokens; t++) _mm256_storeu_ps(y[t] + 8 * (half + h), f[h][t]);
}

INLINE void strip_int(const int format, const int num_tokens, const uint8_t *w,
                      const prepared *in, int64_t token, int64_t columns, strip_result *y) {
    if (num_tokens <= 2 || format <= LLMRT_Q4M) { /* 8-bit weights need more registers */
        strip_halves(format, num_tokens, 0, 2, w, in, token, columns, y);
    } else {
        strip_halves(format, num_tokens, 0, 1, w, in, token, columns, y);
        strip_halves(format, num_tokens, 1, 1, w, in, token, columns, y);
    }
}

#include "dot_float.h"
