/* Functions over sixteen floats, from the operations of simd_*.h alone. */

#define EXP_LOWEST -87.3f

/* e**x to 2 units in the last place, 0 below -87.3; x up to 88. Range reduction by powers of
 * two, then a minimax polynomial (Cephes, expf). */
INLINE vf vf_exp(vf x) {
    vf bounded = vf_min(vf_set1(88.0f), vf_max(vf_set1(EXP_LOWEST), x));
    vi n = vi_round(vf_mul(bounded, vf_set1(1.44269504088896341f)));
    vf nf = vf_from_vi(n);
    vf r = vf_fma(nf, vf_set1(-0.693359375f), bounded);
    r = vf_fma(nf, vf_set1(2.12194440e-4f), r);
    vf p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_fma(p, vf_mul(r, r), r);
    p = vf_mul(vf_add(p, vf_set1(1.0f)), vf_pow2(n));
    return vf_zero_below(p, x, EXP_LOWEST);
}

/* x * sigmoid(x) */
INLINE vf vf_silu(vf x) {
    vf e = vf_exp(vf_sub(vf_zero(), x));
    return vf_div(x, vf_add(vf_set1(1.0f), e));
}

/* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3))), by tanh(u) = 2 sigmoid(2 u) - 1. */
INLINE vf vf_gelu_tanh(vf x) {
    vf cubed = vf_mul(vf_mul(x, x), x);
    vf u = vf_mul(vf_set1(-1.5957691216057308f), vf_fma(vf_set1(0.044715f), cubed, x));
    return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(u)));
}

/* 1 / sqrt(mean(x**2) + eps) of a multiple of 16 floats */
INLINE float inverse_rms(const float *x, int64_t size, float eps) {
    vf sum = vf_zero();
    for (int64_t i = 0; i < size; i += 16) {
        vf v = vf_load(x + i);
        sum = vf_fma(v, v, sum);
    }
    return 1.0f / __builtin_sqrtf(vf_sum(sum) / (float)size + eps);
}

/* y = x / rms(x) * weight; y may be x. */
INLINE void norm(const float *x, const float *weight, int64_t size, float eps, float *y) {
    vf scale = vf_set1(inverse_rms(x, size, eps));
    for (int64_t i = 0; i < size; i += 16)
        vf_store(y + i, vf_mul(vf_mul(vf_load(x + i), scale), vf_load(weight + i)));
}
