/* Sizes of packed weights, the same for whoever writes and whoever reads them; see abi.h. */
#ifndef LLMRT_FORMAT_H
#define LLMRT_FORMAT_H

#include "abi.h"

static inline __attribute__((always_inline)) int has_minimum(int64_t format) {
    return format == LLMRT_Q4M || format == LLMRT_Q8M;
}

/* Bytes of the weights of a group, before its scales. */
static inline __attribute__((always_inline)) int weight_bytes(int64_t format) {
    static const int bits[LLMRT_NUM_FORMATS] = {4, 4, 8, 8, 16, 32};
    return LLMRT_STRIP * LLMRT_GROUP * bits[format] / 8;
}

static inline __attribute__((always_inline)) int group_bytes(int64_t format) {
    int num_scales = format >= LLMRT_BF16 ? 0 : 1 + has_minimum(format);
    return weight_bytes(format) + 2 * LLMRT_STRIP * num_scales;
}

/* Strips begin at multiples of 64 bytes. */
static inline __attribute__((always_inline)) int64_t strip_bytes(int64_t columns, int64_t format) {
    return (columns / LLMRT_GROUP * group_bytes(format) + 63) / 64 * 64;
}

#endif
