/* Sixteen float32 as an array, for any CPU with a C compiler. The same operations in the same
 * order as the other simd_*.h, fused multiply-add included, so that all families give the same
 * bits; without FMA instructions that is slow. */
#include <math.h>

typedef struct {
    float v[16];
} vf;
typedef struct {
    int32_t v[16];
} vi;

#define LANES for (int i = 0; i < 16; i++)

INLINE vf vf_set1(float x) {
    vf r;
    LANES r.v[i] = x;
    return r;
}
INLINE vf vf_zero(void) { return vf_set1(0.0f); }
INLINE vf vf_load(const float *p) {
    vf r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
INLINE void vf_store(float *p, vf x) { memcpy(p, x.v, sizeof x.v); }
INLINE vf vf_kept(vf x) { return x; }
INLINE vf vf_add(vf x, vf y) {
    LANES x.v[i] += y.v[i];
    return x;
}
INLINE vf vf_sub(vf x, vf y) {
    LANES x.v[i] -= y.v[i];
    return x;
}
INLINE vf vf_mul(vf x, vf y) {
    LANES x.v[i] *= y.v[i];
    return x;
}
INLINE vf vf_div(vf x, vf y) {
    LANES x.v[i] /= y.v[i];
    return x;
}
INLINE vf vf_max(vf x, vf y) {
    LANES x.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i];
    return x;
}
INLINE vf vf_min(vf x, vf y) {
    LANES x.v[i] = x.v[i] < y.v[i] ? x.v[i] : y.v[i];
    return x;
}
INLINE vf vf_fma(vf x, vf y, vf z) {
    LANES z.v[i] = fmaf(x.v[i], y.v[i], z.v[i]);
    return z;
}
INLINE vf vf_abs(vf x) {
    LANES x.v[i] = fabsf(x.v[i]);
    return x;
}
/* x where y < limit is false, else 0 */
INLINE vf vf_zero_below(vf x, vf y, float limit) {
    LANES x.v[i] = y.v[i] < limit ? 0.0f : x.v[i];
    return x;
}
/* Lanes first..end-1 of x, the others of y. */
INLINE vf vf_range(int first, int end, vf x, vf y) {
    LANES x.v[i] = i >= first && i < end ? x.v[i] : y.v[i];
    return x;
}
/* Lanes i and i + 8, then i + 4, i + 2, i + 1. */
INLINE float vf_sum(vf x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
    return x.v[0];
}
INLINE float vf_highest(vf x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
    return x.v[0];
}

INLINE vi vi_round(vf x) {
    vi r;
    LANES r.v[i] = x.v[i] >= -2147483648.0f && x.v[i] < 2147483648.0f
                       ? (int32_t)nearbyintf(x.v[i])
                       : INT32_MIN;
    return r;
}
INLINE vf vf_from_vi(vi x) {
    vf r;
    LANES r.v[i] = (float)x.v[i];
    return r;
}
/* 2**n for n from -126 to 127 */
INLINE vf vf_pow2(vi n) {
    vf r;
    LANES {
        uint32_t bits = ((uint32_t)n.v[i] + 127u) << 23;
        memcpy(&r.v[i], &bits, sizeof bits);
    }
    return r;
}
INLINE void vi_store_i8(int8_t *p, vi x) {
    LANES p[i] = (int8_t)(x.v[i] < -128 ? -128 : x.v[i] > 127 ? 127 : x.v[i]);
}
INLINE int32_t vi_sum(vi x, vi y) {
    int32_t sum = 0;
    LANES sum += x.v[i] + y.v[i];
    return sum;
}

INLINE vf vf_load_bf16(const uint16_t *p) {
    vf r;
    LANES {
        uint32_t bits = (uint32_t)p[i] << 16;
        memcpy(&r.v[i], &bits, sizeof bits);
    }
    return r;
}
/* Nothing is gained by another order. */
INLINE vf vf_load_bf16_pairs(const uint16_t *p) { return vf_load_bf16(p); }
INLINE vf vf_from_pairs(vf x) { return x; }
INLINE vf vf_to_pairs(vf x) { return x; }
INLINE float float_of_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31;
    uint32_t mantissa = half & 1023u, bits;
    if (exponent == 0) { /* zero or subnormal: mantissa * 2**-24 */
        float magnitude = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &magnitude, sizeof bits);
    } else if (exponent == 31) {
        bits = 0x7f800000u | mantissa << 13;
    } else {
        bits = (exponent + 112u) << 23 | mantissa << 13;
    }
    bits |= sign;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
INLINE vf vf_load_f16(const uint16_t *p) {
    vf r;
    LANES r.v[i] = float_of_f16(p[i]);
    return r;
}
INLINE vf vf_load_i8(const int8_t *p) {
    vf r;
    LANES r.v[i] = (float)p[i];
    return r;
}
/* e4m3 is half precision with a bias of 7 in place of 15: shifted there, it is 256 times less. */
INLINE vf vf_load_fp8(const uint8_t *p) {
    vf r;
    LANES r.v[i] = 256.0f * float_of_f16((uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
    return r;
}
