/* Stands in for the compiler's header, so that the AVX-512 family runs on a CPU that has AVX2 and
 * FMA only: its 512-bit functions are those of SIMDe (apt install libsimde-dev), or, where that
 * (0.7.4) has none, pairs of 256-bit ones here. */
#ifndef LLMRT_EMULATED_IMMINTRIN_H
#define LLMRT_EMULATED_IMMINTRIN_H

#include <stdint.h>
#include <string.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include_next <immintrin.h>
#include <simde/x86/avx512.h>

#define __m512 simde__m512
#define __m512i simde__m512i
#define __m512d simde__m512d

#define HALVES(type, half, name)                                                                 \
    static inline type name##_of_halves(half low, half high) {                                   \
        type whole;                                                                              \
        memcpy(&whole, &low, sizeof low);                                                        \
        memcpy((char *)&whole + sizeof low, &high, sizeof high);                                 \
        return whole;                                                                            \
    }                                                                                            \
    static inline half name##_half(type whole, int which) {                                      \
        half found;                                                                              \
        memcpy(&found, (const char *)&whole + which * (int)sizeof found, sizeof found);          \
        return found;                                                                            \
    }
HALVES(__m512, __m256, ps)
HALVES(__m512i, __m256i, si)

static inline __m512 emulated_cvtepi32_ps(__m512i x) {
    return ps_of_halves(_mm256_cvtepi32_ps(si_half(x, 0)), _mm256_cvtepi32_ps(si_half(x, 1)));
}
static inline __m512i emulated_cvtps_epi32(__m512 x) {
    return si_of_halves(_mm256_cvtps_epi32(ps_half(x, 0)), _mm256_cvtps_epi32(ps_half(x, 1)));
}
static inline __m512i emulated_cvtepi8_epi32(__m128i x) {
    return si_of_halves(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
}
static inline __m512i emulated_cvtepu16_epi32(__m256i x) {
    return si_of_halves(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                        _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)));
}
static inline __m512 emulated_cvtph_ps(__m256i x) {
    return ps_of_halves(_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                        _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
static inline int32_t emulated_reduce_add_epi32(__m512i x) {
    uint32_t lanes[16], sum = 0;
    memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < 16; i++) sum += lanes[i];
    return (int32_t)sum;
}
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_reduce_add_epi32 emulated_reduce_add_epi32

#endif
