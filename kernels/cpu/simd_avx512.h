/* Sixteen float32 as one register of AVX-512. The same operations in the same order as the other
 * simd_*.h, so that all families give the same bits. */
#include <immintrin.h>

typedef __m512 vf;
typedef __m512i vi;

INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
/* x, kept in registers rather than loaded again for each use. */
INLINE vf vf_kept(vf x) {
    __asm__("" : "+v"(x));
    return x;
}
INLINE vf vf_add(vf x, vf y) { return _mm512_add_ps(x, y); }
INLINE vf vf_sub(vf x, vf y) { return _mm512_sub_ps(x, y); }
INLINE vf vf_mul(vf x, vf y) { return _mm512_mul_ps(x, y); }
INLINE vf vf_div(vf x, vf y) { return _mm512_div_ps(x, y); }
INLINE vf vf_max(vf x, vf y) { return _mm512_max_ps(x, y); }
INLINE vf vf_min(vf x, vf y) { return _mm512_min_ps(x, y); }
INLINE vf vf_fma(vf x, vf y, vf z) { return _mm512_fmadd_ps(x, y, z); }
INLINE vf vf_abs(vf x) { return _mm512_abs_ps(x); }
/* x where y < limit is false, else 0 */
INLINE vf vf_zero_below(vf x, vf y, float limit) {
    __mmask16 below = _mm512_cmp_ps_mask(y, _mm512_set1_ps(limit), _CMP_LT_OQ);
    return _mm512_mask_blend_ps(below, x, _mm512_setzero_ps());
}
/* Lanes first..end-1 of x, the others of y. */
INLINE vf vf_range(int first, int end, vf x, vf y) {
    unsigned below_end = end <= 0 ? 0u : end >= 16 ? 0xffffu : (1u << end) - 1u;
    unsigned below_first = first <= 0 ? 0u : first >= 16 ? 0xffffu : (1u << first) - 1u;
    return _mm512_mask_blend_ps((__mmask16)(below_end & ~below_first), y, x);
}
INLINE __m256 upper8(vf x) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}
/* Lanes i and i + 8, then i + 4, i + 2, i + 1. */
INLINE float vf_sum(vf x) {
    __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x), upper8(x));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
INLINE float vf_highest(vf x) {
    __m256 s = _mm256_max_ps(_mm512_castps512_ps256(x), upper8(x));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

INLINE vi vi_round(vf x) { return _mm512_cvtps_epi32(x); }
INLINE vf vf_from_vi(vi x) { return _mm512_cvtepi32_ps(x); }
/* 2**n for n from -126 to 127 */
INLINE vf vf_pow2(vi n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
INLINE void vi_store_i8(int8_t *p, vi x) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(x));
}
INLINE int32_t vi_sum(vi x, vi y) { return _mm512_reduce_add_epi32(_mm512_add_epi32(x, y)); }

INLINE vf vf_load_bf16(const uint16_t *p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
/* One register holds all 16, in order. */
INLINE vf vf_load_bf16_pairs(const uint16_t *p) { return vf_load_bf16(p); }
INLINE vf vf_from_pairs(vf x) { return x; }
INLINE vf vf_to_pairs(vf x) { return x; }
INLINE vf vf_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vf vf_load_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* e4m3 is half precision with a bias of 7 in place of 15: shifted there, it is 256 times less. */
INLINE vf vf_load_fp8(const uint8_t *p) {
    __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
    __m256i rest = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256.0f));
}
