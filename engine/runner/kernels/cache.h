// Memory layout of the KV cache.
#pragma once

#include "lanes.h"

namespace baton {

struct Cache {
    Bf16* blocks;  // [blocks, layers, 2, kv_heads, block_size, head_dim]
    std::int64_t num_layers, num_kv_heads, block_size, head_dim;

    // Slots of a head in one block: keys (which = 0) or values (which = 1).
    Bf16* slots(std::int64_t block, std::int64_t layer, int which, std::int64_t head) const {
        return blocks + (((block * num_layers + layer) * 2 + which) * num_kv_heads + head) *
                            block_size * head_dim;
    }
};

}  // namespace baton
