/* The ops for any CPU. */
#include <math.h>

#define INLINE static inline __attribute__((unused))

#include "engine.h"
#include "simd_portable.h"
#include "mathx.h"
#include "dot_portable.h"
#define ATTEND_WIDTH 1
#include "ops.h"

static int is_supported(void) { return 1; }

const llmrt_family llmrt_portable = FAMILY("portable");
