/* The ops for CPUs that have AVX2 with FMA. */
#if defined(__x86_64__) && defined(__GNUC__)

/* Before the instructions that it asks for are allowed. */
static int is_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <math.h>

#include "engine.h"
#include "simd_avx2.h"
#include "mathx.h"
#include "dot_avx2.h"
#define ATTEND_WIDTH 1
#include "ops.h"

const llmrt_family llmrt_avx2 = FAMILY("avx2");

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
