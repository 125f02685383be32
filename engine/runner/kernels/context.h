// A KV head's context, a few panels of sixty-four slots at a time.
#pragma once

#include "cache.h"
#include "panels.h"

#include <algorithm>

namespace baton {

// A sequence's slots in one layer.
struct Context {
    Cache cache;
    std::int64_t layer;
    const std::int64_t* table;
    std::int64_t length;

    // Keys (which = 0) or values (1).
    const Bf16* at(std::int64_t slot, int which, std::int64_t head) const {
        const Bf16* slots = cache.slots(table[slot / cache.block_size], layer, which, head);
        return slots + slot % cache.block_size * cache.head_dim;
    }
};

constexpr int kPanelsAtOnce = 4;
constexpr std::int64_t kSlotsAtOnce = kPanelsAtOnce * kPanelRows;

// Those that are taken at once: the keys or the values of a head, and how many there are.
struct Slots {
    const Bf16* at[kSlotsAtOnce];
    std::int64_t count;

    // Of the context, from `first` on, so many; what follows is the last of them.
    void find(const Context& context, std::int64_t head, int which, std::int64_t first,
              std::int64_t end) {
        count = std::min(kSlotsAtOnce, end - first);
        const std::int64_t block_size = context.cache.block_size;
        for (std::int64_t i = 0; i < count;) {
            const Bf16* slot = context.at(first + i, which, head);
            const std::int64_t end = std::min(count, i + block_size - (first + i) % block_size);
            for (; i < end; ++i, slot += context.cache.head_dim) at[i] = slot;
        }
        for (std::int64_t i = count; i < kSlotsAtOnce; ++i) at[i] = at[count - 1];
    }
};

// The slots that are taken at once as they lie, of all heads, and those that are taken next: these
// are only fetched.
class PlacedSlots {
  public:
    void take(const Context& context, std::int64_t first, std::int64_t end) {
        size_ = context.cache.head_dim;
        head_ = context.cache.block_size * size_;
        keys_.find(context, 0, 0, first, end);
        values_.find(context, 0, 1, first, end);
        const std::int64_t next = first + keys_.count;
        next_keys_.find(context, 0, 0, next < end ? next : first, end);  // or in vain
    }

  protected:
    std::int64_t size_, head_;  // numbers of a slot; of a head's slots in a block
    Slots keys_, values_, next_keys_;  // of the first head
};

}  // namespace baton
