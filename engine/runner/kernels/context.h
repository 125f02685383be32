// A KV head's context, sixty-four slots at a time, in the order in which a product reads them.
#pragma once

#include "cache.h"
#include "tiles.h"

#include <algorithm>
#include <vector>

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

// The slots of one panel. Past the end of the context only keys lie there, and mean nothing.
class ContextPanel {
  public:
    explicit ContextPanel(std::int64_t head_dim)
        : size_(head_dim), keys_(kVectors * pairs()), values_(wide() * kPartLines),
          none_(head_dim) {}

    std::int64_t pairs() const { return size_ / 2; }
    std::int64_t wide() const { return (size_ + kPanelRows - 1) / kPanelRows; }  // parts of a value

    // For each pair of places, that of each slot.
    const Words* keys() const { return reinterpret_cast<const Words*>(keys_.data()); }

    // As many as are multiplied at once, or a multiple of it: those past the end are zeros.
    std::int64_t slot_pairs() const {
        const std::int64_t slots = 2 * kPairsAtOnce;
        return (count_ + slots - 1) / slots * kPairsAtOnce;
    }

    // For each pair of slots, sixty-four places of theirs.
    const Words* values(std::int64_t part) const {
        return reinterpret_cast<const Words*>(values_.data() + part * kPartLines);
    }

    // While a head's slots are copied, the same slots of the next head are fetched: they lie next_
    // numbers further on in their blocks. Only into the second cache, as the panel fills the first;
    // behind the last head something else is fetched, in vain.
    void take(const Context& context, std::int64_t head, std::int64_t panel) {
        const Bf16* slots[kPanelRows];
        next_ = context.cache.block_size * size_;
        count_ = std::min<std::int64_t>(kPanelRows, context.length - panel * kPanelRows);
        find(slots, context, head, panel, 0);
        for (int first = 0; first < count_; first += 8) take_keys(slots + first, first);
        find(slots, context, head, panel, 1);
        for (int pair = 0; pair < slot_pairs(); ++pair) take_values(slots + 2 * pair, pair);
    }

  private:
    struct alignas(64) Line {
        std::uint32_t words[kLanes];
    };
    static constexpr std::int64_t kPartLines = kPanelRows / 2 * kVectors;

    void find(const Bf16* (&slots)[kPanelRows], const Context& context, std::int64_t head,
              std::int64_t panel, int which) const {
        const std::int64_t first = panel * kPanelRows, block_size = context.cache.block_size;
        for (std::int64_t i = 0; i < count_;) {
            const Bf16* slot = context.at(first + i, which, head);
            const std::int64_t end = std::min(count_, i + block_size - (first + i) % block_size);
            for (; i < end; ++i, slot += size_) slots[i] = slot;
        }
        std::fill(slots + count_, slots + kPanelRows, none_.data());
    }

    // Of eight slots.
    void take_keys(const Bf16* const* keys, int first) {
        std::int64_t pair = 0;
        for (; pair + 8 <= pairs(); pair += 8) {
            EightWords rows[8];
            for (int i = 0; i < 8; ++i) {
                const Bf16* from = keys[i] + 2 * pair;
                std::memcpy(&rows[i], from, sizeof rows[i]);
                if (pair % 16 == 0) fetch(from + next_);
            }
            turn(rows);
            for (int i = 0; i < 8; ++i)
                std::memcpy(key_at(first, pair + i), &rows[i], sizeof rows[i]);
        }
        for (; pair < pairs(); ++pair)
            for (int i = 0; i < 8; ++i)
                std::memcpy(key_at(first + i, pair), keys[i] + 2 * pair, sizeof(std::uint32_t));
    }

    // Of two slots.
    void take_values(const Bf16* const* values, int pair) {
        std::int64_t d = 0;
        for (; d + kLanes <= size_; d += kLanes) {
            const Words both = words(values[0] + d) | words(values[1] + d) << 16;
            std::memcpy(value_at(d, pair), &both, sizeof both);
            for (int i = 0; d % 32 == 0 && i < 2; ++i) fetch(values[i] + d + next_);
        }
        for (; d < size_; ++d)
            *value_at(d, pair) = std::uint32_t(values[0][d]) | std::uint32_t(values[1][d]) << 16;
    }

    static void fetch(const Bf16* numbers) { __builtin_prefetch(numbers, 0, 2); }

    std::uint32_t* key_at(std::int64_t slot, std::int64_t pair) {
        return keys_[vector_at(pair, slot / kLanes, pairs())].words + slot % kLanes;
    }

    std::uint32_t* value_at(std::int64_t d, int pair) {
        const std::int64_t within = d % kPanelRows;
        Line* lines = values_.data() + d / kPanelRows * kPartLines;
        return lines[vector_at(pair, within / kLanes, kPanelRows / 2)].words + within % kLanes;
    }

    std::int64_t size_, count_ = 0, next_ = 0;  // slots; numbers to the next head's
    std::vector<Line> keys_, values_;
    std::vector<Bf16> none_;
};

}  // namespace baton
