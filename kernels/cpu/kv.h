/* Elements of the KV cache in its four formats. */

INLINE vf kv_load(const int format, const void *elements, int64_t idx) {
    switch (format) {
    case LLMRT_KV_BF16:
        return vf_load_bf16((const uint16_t *)elements + idx);
    case LLMRT_KV_INT8:
        return vf_load_i8((const int8_t *)elements + idx);
    case LLMRT_KV_FP8:
        return vf_load_fp8((const uint8_t *)elements + idx);
    default:
        return vf_load((const float *)elements + idx);
    }
}

/* Sixteen elements in an order that is cheapest for the format, and that order undone. */
INLINE vf kv_load_pairs(const int format, const void *elements, int64_t idx) {
    if (format == LLMRT_KV_BF16) return vf_load_bf16_pairs((const uint16_t *)elements + idx);
    return kv_load(format, elements, idx);
}
INLINE vf kv_from_pairs(const int format, vf x) {
    return format == LLMRT_KV_BF16 ? vf_from_pairs(x) : x;
}
INLINE vf kv_to_pairs(const int format, vf x) {
    return format == LLMRT_KV_BF16 ? vf_to_pairs(x) : x;
}

/* To the nearest, ties to even; a NaN stays one. */
INLINE uint16_t bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

/* e4m3 of |x| <= 448, to the nearest, ties to even; subnormals are multiples of 2**-9. */
static inline uint8_t fp8_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint8_t sign = (uint8_t)(bits >> 24 & 0x80u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return 0x7f;
    if (bits >= 0x43e00000u) return sign | 0x7e; /* 448 and above */
    if (bits < 0x3c800000u) {                    /* below 2**-6 */
        float magnitude;
        memcpy(&magnitude, &bits, sizeof magnitude);
        return sign | (uint8_t)(__builtin_rintf(magnitude * 512.0f));
    }
    bits += 0x7ffffu + (bits >> 20 & 1u);
    return sign | (uint8_t)((bits >> 20) - (120u << 3));
}

/* The largest number of a scaled format, to which the largest of a token and head is scaled. */
INLINE float kv_largest(int64_t format) { return format == LLMRT_KV_INT8 ? 127.0f : 448.0f; }

/* The largest magnitude; NaN if there is an infinity or a NaN. */
INLINE float largest_of(const float *x, int64_t size) {
    vf highest = vf_zero(), spoilt = vf_zero(); /* 0, or NaN */
    for (int64_t i = 0; i < size; i += 16) {
        vf v = vf_load(x + i);
        highest = vf_max(highest, vf_abs(v));
        spoilt = vf_fma(v, vf_zero(), spoilt);
    }
    return vf_highest(highest) + vf_sum(spoilt);
}

/* One head of one token, `stride` elements apart, in each format. */
#define STORE_HEAD(name, type, of)                                                               \
    static void store_##name(const float *x, int64_t size, float factor, type *out,              \
                             int64_t stride) {                                                   \
        type narrow[16];                                                                         \
        for (int64_t i = 0; i < size; i += 16) {                                                 \
            for (int j = 0; j < 16; j++) narrow[j] = of(x[i + j] * factor);                      \
            if (stride == 1) {                                                                   \
                memcpy(out + i, narrow, sizeof narrow);                                          \
                continue;                                                                        \
            }                                                                                    \
            for (int j = 0; j < 16; j++) out[(i + j) * stride] = narrow[j];                      \
        }                                                                                        \
    }
#define AS_IT_IS(x) (x)
#define INT8_OF(x) ((int8_t)((x) == (x) ? __builtin_rintf(x) : 0.0f))
STORE_HEAD(bf16, uint16_t, bf16_of)
STORE_HEAD(f32, float, AS_IT_IS)
STORE_HEAD(int8, int8_t, INT8_OF)
STORE_HEAD(fp8, uint8_t, fp8_of)

/* Element `first` on; the scaled formats also store their scale, NaN if an element is not finite.
 * Elements below 2**-100 are 0: the factor must be finite. */
static void store_head(int64_t format, const float *x, int64_t size, uint8_t *elements,
                       int64_t first, int64_t stride, float *scale) {
    uint8_t *out = elements + first * kv_element_bytes(format);
    float factor = 1.0f;
    if (is_scaled(format)) {
        float largest = largest_of(x, size);
        factor = largest >= 0x1p-100f ? kv_largest(format) / largest : 0.0f;
        *scale = largest / kv_largest(format);
    }
    switch (format) {
    case LLMRT_KV_BF16:
        store_bf16(x, size, factor, (uint16_t *)out, stride);
        break;
    case LLMRT_KV_INT8:
        store_int8(x, size, factor, (int8_t *)out, stride);
        break;
    case LLMRT_KV_FP8:
        store_fp8(x, size, factor, out, stride);
        break;
    default:
        store_f32(x, size, factor, (float *)out, stride);
    }
}
