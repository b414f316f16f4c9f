/* Every op over the operations of one simd_*.h and one dot_*.h, and the table of them. */
#include "kv.h"
#include "embed.h"
#include "prepare.h"
#include "linear.h"
#include "rope.h"
#include "attention.h"

#define FAMILY(family_name)                                                                      \
    {                                                                                            \
        .name = family_name, .is_supported = is_supported, .embed = embed, .prepare = prepare,   \
        .linear = linear, .rope = rope, .attend = attend, .add_norm = add_norm, .best = best     \
    }
