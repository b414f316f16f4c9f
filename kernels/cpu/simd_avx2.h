/* Sixteen float32 as two registers of AVX2. The same operations in the same order as the other
 * simd_*.h, so that all families give the same bits. */
#include <immintrin.h>

typedef struct {
    __m256 a, b;
} vf;
typedef struct {
    __m256i a, b;
} vi;

#define VF2(expr_a, expr_b) ((vf){(expr_a), (expr_b)})

INLINE vf vf_zero(void) { return VF2(_mm256_setzero_ps(), _mm256_setzero_ps()); }
INLINE vf vf_set1(float x) { return VF2(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE vf vf_load(const float *p) { return VF2(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void vf_store(float *p, vf x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
/* x, kept in registers rather than loaded again for each use. */
INLINE vf vf_kept(vf x) {
    __asm__("" : "+x"(x.a), "+x"(x.b));
    return x;
}
INLINE vf vf_add(vf x, vf y) { return VF2(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
INLINE vf vf_sub(vf x, vf y) { return VF2(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
INLINE vf vf_mul(vf x, vf y) { return VF2(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
INLINE vf vf_div(vf x, vf y) { return VF2(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
INLINE vf vf_max(vf x, vf y) { return VF2(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
INLINE vf vf_min(vf x, vf y) { return VF2(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
INLINE vf vf_fma(vf x, vf y, vf z) {
    return VF2(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
INLINE vf vf_abs(vf x) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return VF2(_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask));
}
/* x where y < limit is false, else 0 */
INLINE vf vf_zero_below(vf x, vf y, float limit) {
    const __m256 l = _mm256_set1_ps(limit);
    return VF2(_mm256_andnot_ps(_mm256_cmp_ps(y.a, l, _CMP_LT_OQ), x.a),
               _mm256_andnot_ps(_mm256_cmp_ps(y.b, l, _CMP_LT_OQ), x.b));
}
/* Lanes first..end-1 of x, the others of y. */
INLINE vf vf_range(int first, int end, vf x, vf y) {
    const __m256i lo = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i hi = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    const __m256i f = _mm256_set1_epi32(first - 1), e = _mm256_set1_epi32(end);
    const __m256i in_lo =
        _mm256_and_si256(_mm256_cmpgt_epi32(lo, f), _mm256_cmpgt_epi32(e, lo));
    const __m256i in_hi =
        _mm256_and_si256(_mm256_cmpgt_epi32(hi, f), _mm256_cmpgt_epi32(e, hi));
    return VF2(_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(in_lo)),
               _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(in_hi)));
}
/* Lanes i and i + 8, then i + 4, i + 2, i + 1. */
INLINE float vf_sum(vf x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
INLINE float vf_highest(vf x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

INLINE vi vi_round(vf x) { return (vi){_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE vf vf_from_vi(vi x) { return VF2(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
/* 2**n for n from -126 to 127 */
INLINE vf vf_pow2(vi n) {
    const __m256i bias = _mm256_set1_epi32(127);
    return VF2(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
               _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23)));
}
INLINE void vi_store_i8(int8_t *p, vi x) {
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    _mm_storeu_si128((__m128i *)p, bytes);
}
INLINE int32_t vi_sum(vi x, vi y) {
    __m256i s = _mm256_add_epi32(_mm256_add_epi32(x.a, x.b), _mm256_add_epi32(y.a, y.b));
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

INLINE __m256 load8_bf16(const uint16_t *p) {
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
INLINE vf vf_load_bf16(const uint16_t *p) { return VF2(load8_bf16(p), load8_bf16(p + 8)); }
/* The even elements of 16, then the odd ones: half the work of vf_load_bf16. */
INLINE vf vf_load_bf16_pairs(const uint16_t *p) {
    __m256i x = _mm256_loadu_si256((const __m256i *)p);
    return VF2(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
               _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u))));
}
INLINE vf vf_from_pairs(vf x) {
    __m256 low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
    return VF2(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
INLINE __m256 middle_swapped(__m256 x) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
}
INLINE vf vf_to_pairs(vf x) {
    return VF2(middle_swapped(_mm256_shuffle_ps(x.a, x.b, 0x88)),
               middle_swapped(_mm256_shuffle_ps(x.a, x.b, 0xdd)));
}
INLINE vf vf_load_f16(const uint16_t *p) {
    return VF2(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
               _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
INLINE vf vf_load_i8(const int8_t *p) {
    __m128i x = _mm_loadu_si128((const __m128i *)p);
    return VF2(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
               _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))));
}
/* e4m3 is half precision with a bias of 7 in place of 15: shifted there, it is 256 times less. */
INLINE vf vf_load_fp8(const uint8_t *p) {
    __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
    __m256i rest = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
    __m256i half = _mm256_or_si256(sign, rest);
    const __m256 up = _mm256_set1_ps(256.0f);
    return VF2(_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), up),
               _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), up));
}
