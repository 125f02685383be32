// The KV cache as it lies in memory.
#pragma once

#include "lanes.h"

namespace baton {

struct Cache {
    Bf16* blocks;  // [blocks, layers, 2, kv_heads, block_size, head_dim]
    std::int64_t num_layers, num_kv_heads, block_size, head_dim;

    // The slots of one block: keys (which = 0) or values (1) of a head.
    Bf16* slots(std::int64_t block, std::int64_t layer, int which, std::int64_t head) const {
        return blocks + (((block * num_layers + layer) * 2 + which) * num_kv_heads + head) *
                            block_size * head_dim;
    }
};

}  // namespace baton
