// KV slots of a sequence, read a few panels of 64 slots at a time.
#pragma once

#include "abi.h"
#include "byte_kv.h"
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

    // Replaces slots of bytes by their numbers as bf16 in `widened`, [kScoreTileSlots, head_dim].
    void widen(const PagedKv& kv, AlignedVector<Bf16>& widened) {
        widened.resize(kScoreTileSlots * kv.head_dim);
        for (std::int64_t i = 0; i < count; ++i) {
            baton::widen(kv, at[i], widened.data() + i * kv.head_dim);
            at[i] = widened.data() + i * kv.head_dim;
        }
        for (std::int64_t i = count; i < kScoreTileSlots; ++i) at[i] = at[count - 1];
    }
};

// Scales of the keys and values of a head. Keys are multiplied with queries, and weights with
// values, as the numbers that are stored: the scales multiply scores and weights.
struct SlotScales {
    alignas(64) float keys[kScoreTileSlots], values[kScoreTileSlots];

    // `slots` of the key (0) or the value (1) begin `offset` units of two bytes after their
    // address.
    void read(const PagedKv& kv, std::int64_t place, const SlotPointers& slots, int key_or_value,
              std::int64_t head, std::int64_t offset = 0) {
        float* const scales = key_or_value == 0 ? keys : values;
        for (std::int64_t i = 0; i < kScoreTileSlots; ++i)
            scales[i] = kv.is_int8 ? int8_scale(slots.at[i] + offset, kv.head_dim)
                                   : kv.scale(place, key_or_value, head);
    }
};

// Slots that are read in place for all heads, and those after them, which are prefetched. FP8, and
// int8 if WIDENS_INT8, is read as bf16.
template <bool WIDENS_INT8>
class UnpackedSlotsBase {
  public:
    static constexpr int kStepSlots = 16;

    void load(const KvContext& context, std::int64_t first, std::int64_t end) {
        kv_ = context.kv, place_ = context.layer;
        size_ = kv_.head_dim;
        head_ = kv_.block_size * kv_.slot_size();
        keys_.find(context, 0, 0, first, end);
        values_.find(context, 0, 1, first, end);
        const std::int64_t next = first + keys_.count;
        next_keys_.find(context, 0, 0, next < end ? next : first, end);  // at the end: unused
        is_widened_ = kv_.scales != nullptr || (WIDENS_INT8 && kv_.is_int8);
        if (!is_widened_) return;
        widened_.resize(kStepSlots * size_);
        widened_from_ = nullptr;
        for (int i = 0; i < kStepSlots; ++i) widened_at_[i] = widened_.data() + i * size_;
    }

    // Reads the scales of a head into `scales`. Returns null if there are none.
    const SlotScales* scales(std::int64_t head, SlotScales& scales) const {
        if (!kv_.has_bytes()) return nullptr;
        scales.read(kv_, place_, keys_, 0, head, head * head_);
        scales.read(kv_, place_, values_, 1, head, head * head_);
        return &scales;
    }

  protected:
    // Keys or values of a head in a step, as bf16. A slot begins `offset` numbers after its
    // address.
    struct Slots {
        const Bf16* const* at;
        std::int64_t offset, count;
        const Bf16* ahead;  // is prefetched
    };

    // `after_last` is prefetched in the last step. Bytes are converted into a buffer that stays in
    // L1, which all runs of a head share.
    Slots slots_at(const SlotPointers& all, std::int64_t step, std::int64_t head,
                   const Bf16* after_last) const {
        const std::int64_t slot = step * kStepSlots, offset = head * head_;
        const std::int64_t count = std::min<std::int64_t>(kStepSlots, all.count - slot);
        const bool is_last = slot + kStepSlots >= all.count;
        const Bf16* const ahead = (is_last ? after_last : all.at[slot + kStepSlots]) + offset;
        if (!is_widened_) return {all.at + slot, offset, count, ahead};
        const Slots widened{widened_at_, 0, count, widened_.data()};
        if (widened_from_ == all.at[slot] + offset && widened_slot_ == slot) return widened;
        widened_from_ = all.at[slot] + offset, widened_slot_ = slot;
        for (std::int64_t at = 0; at < kStepSlots * kv_.slot_size(); at += 32)
            __builtin_prefetch(ahead + at, 0, 2);
        for (int i = 0; i < kStepSlots; ++i)
            widen(kv_, all.at[slot + i] + offset, widened_.data() + i * size_);
        return widened;
    }

    PagedKv kv_;
    std::int64_t place_, size_, head_;        // numbers per slot; distance of heads in a block
    SlotPointers keys_, values_, next_keys_;  // of head 0

  private:
    bool is_widened_;
    mutable AlignedVector<Bf16> widened_;  // numbers of the slots of a step
    mutable const Bf16* widened_from_ = nullptr;
    mutable std::int64_t widened_slot_ = 0;
    const Bf16* widened_at_[kStepSlots];
};

}  // namespace baton
