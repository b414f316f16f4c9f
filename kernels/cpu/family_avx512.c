/* The ops for CPUs that have AVX-512 with VNNI. */
#if defined(__x86_64__) && defined(__GNUC__)

/* Before the instructions that it asks for are allowed. */
static int is_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")
#endif

#include <math.h>

#include "engine.h"
#include "simd_avx512.h"
#include "mathx.h"
#include "dot_avx512.h"
#define ATTEND_WIDTH 2
#include "ops.h"

const llmrt_family llmrt_avx512 = FAMILY("avx512");

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
