// KV slots of a sequence, read a few panels of 64 slots at a time.
#pragma once

#include "abi.h"
#include "int8_kv.h"
#include "panels.h"

#include <algorithm>

namespace baton {

// Slots of a sequence in one layer.
struct KvContext {
    PagedKv kv;
    std::int64_t layer;
    const std::int64_t* table;
    std::int64_t length;
    // The first slot that is needed. Earlier blocks are not read: they may belong to others.
    std::int64_t begin = 0;

    // Key (key_or_value = 0) or value (key_or_value = 1) of a slot.
    const Bf16* at(std::int64_t slot, int key_or_value, std::int64_t head) const {
        const Bf16* slots = kv.slots(table[slot / kv.block_size], layer, key_or_value, head);
        return slots + slot % kv.block_size * kv.slot_size();
    }
};

constexpr int kScoreTilePanels = 4;
constexpr std::int64_t kScoreTileSlots = kScoreTilePanels * kPanelRows;

// Addresses of the keys or values of a head that are processed together.
struct SlotPointers {
    const Bf16* at[kScoreTileSlots];
    std::int64_t count;

    // Finds up to kScoreTileSlots slots in [first, end). The slots of a block are contiguous, also
    // before the context's begin: AMX loads them as the rows of a tile. Entries of earlier blocks
    // repeat the first slot of the begin's block, and entries past `count` the last one.
    void find(const KvContext& context, std::int64_t head, int key_or_value, std::int64_t first,
              std::int64_t end) {
        count = std::min(kScoreTileSlots, end - first);
        const std::int64_t block_size = context.kv.block_size;
        const std::int64_t needed = std::clamp(context.begin, first, first + count - 1);
        const std::int64_t skipped =
            std::max<std::int64_t>(0, needed / block_size * block_size - first);
        for (std::int64_t i = skipped; i < count;) {
            const Bf16* slot = context.at(first + i, key_or_value, head);
            const std::int64_t end = std::min(count, i + block_size - (first + i) % block_size);
            for (; i < end; ++i, slot += context.kv.slot_size()) at[i] = slot;
        }
        for (std::int64_t i = 0; i < skipped; ++i) at[i] = at[skipped];
        for (std::int64_t i = count; i < kScoreTileSlots; ++i) at[i] = at[count - 1];
    }

    // Replaces slots of int8 by their numbers as bf16 in `widened`, [kScoreTileSlots, size].
    void widen(std::int64_t size, AlignedVector<Bf16>& widened) {
        widened.resize(kScoreTileSlots * size);
        for (std::int64_t i = 0; i < count; ++i) {
            baton::widen(at[i], size, widened.data() + i * size);
            at[i] = widened.data() + i * size;
        }
        for (std::int64_t i = count; i < kScoreTileSlots; ++i) at[i] = at[count - 1];
    }
};

// Scales of int8 keys and values of a head. Keys are multiplied with queries, and weights with
// values, as whole numbers: the scales multiply scores and weights.
struct SlotScales {
    alignas(64) float keys[kScoreTileSlots], values[kScoreTileSlots];

    // `offset`: of the head, in units of two bytes.
    static void read(float* scales, const SlotPointers& slots, std::int64_t size,
                     std::int64_t offset = 0) {
        for (std::int64_t i = 0; i < kScoreTileSlots; ++i)
            scales[i] = scale_of(slots.at[i] + offset, size);
    }
};

// Slots that are read in place for all heads, and those after them, which are prefetched.
class UnpackedSlotsBase {
  public:
    void load(const KvContext& context, std::int64_t first, std::int64_t end) {
        size_ = context.kv.head_dim;
        head_ = context.kv.block_size * context.kv.slot_size();
        is_int8_ = context.kv.is_int8;
        keys_.find(context, 0, 0, first, end);
        values_.find(context, 0, 1, first, end);
        const std::int64_t next = first + keys_.count;
        next_keys_.find(context, 0, 0, next < end ? next : first, end);  // at the end: unused
    }

    // Reads the scales of a head into `scales`. Returns null if there are none.
    const SlotScales* scales(std::int64_t head, SlotScales& scales) const {
        if (!is_int8_) return nullptr;
        SlotScales::read(scales.keys, keys_, size_, head * head_);
        SlotScales::read(scales.values, values_, size_, head * head_);
        return &scales;
    }

  protected:
    bool is_int8_;
    std::int64_t size_, head_;                // numbers per slot; numbers per head in a block
    SlotPointers keys_, values_, next_keys_;  // of head 0
};

}  // namespace baton
