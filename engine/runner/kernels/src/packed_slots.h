// Keys and values of a head, packed for products with many query rows.
#pragma once

#include "kv_context.h"
#include "microkernel.h"

#include <vector>

namespace baton {

// Packed slots of a few panels. Slots past the end are undefined.
class PackedSlots {
  public:
    explicit PackedSlots(const PagedKv& kv) : size_(kv.head_dim), value_size_(kv.value_dim) {}

    // Packs the slots in [first, end). Meanwhile it prefetches the same slots of the next head, at
    // a distance of next_ numbers, into L2. For the last head these prefetches are useless.
    void load(const KvContext& context, std::int64_t head, std::int64_t first, std::int64_t end) {
        if (keys_.empty()) {
            keys_.resize(kScoreTilePanels * kVectors * pairs());
            values_.resize(num_parts() * kPartLines);
        }
        SlotPointers slots;
        has_scales_ = context.kv.has_bytes();
        find(slots, context, head, 0, first, end);
        count_ = slots.count;
        if (context.kv.num_tensors == 1) return pack_latents(slots);
        next_ = has_scales_ ? 0 : context.kv.block_size * size_;
        for (int slot = 0; slot < count_; slot += 8)
            pack_keys(slots.at + slot, slots.at + slot, slot);
        find(slots, context, head, 1, first, end);
        for (int pair = 0; pair < slot_pairs(); ++pair) pack_values(slots.at + 2 * pair, pair);
    }

    // Scales of the slots, or null if they have none.
    const SlotScales* scales() const { return has_scales_ ? &scales_ : nullptr; }

    // scores = queries * keys, for panels in [panel, end).
    void score(TileConfig& tile_config, float* scores, const Bf16* queries, int count,
               std::int64_t panel, std::int64_t end) const {
        for (; panel < end; ++panel)
            multiply_rows<Init::kZero>(tile_config, scores + panel * kPanelRows, kScoreTileSlots,
                                       queries, size_, count,
                                       words_of(keys_, panel * kVectors * pairs()), pairs());
    }

    // sums += weights * values, for panels in [panel, end).
    void add_values(TileConfig& tile_config, float* sums, std::int64_t sum_stride,
                    const Bf16* weights, int count, std::int64_t panel, std::int64_t end) const {
        const std::int64_t first = panel * kPanelRows / 2;
        const std::int64_t num_pairs = std::min(end * kPanelRows / 2, slot_pairs()) - first;
        for (std::int64_t part = 0; part < num_parts(); ++part)
            multiply_rows<Init::kLoad>(tile_config, sums + part * kPanelRows, sum_stride,
                                       weights + 2 * first, kScoreTileSlots, count,
                                       words_of(values_, part * kPartLines + first * kVectors),
                                       num_pairs);
    }

  private:
    struct alignas(64) CacheLine {
        std::uint32_t words[kLanes];
    };
    static constexpr std::int64_t kPartLines = kScoreTileSlots / 2 * kVectors;

    std::int64_t pairs() const { return size_ / 2; }
    // Parts of a value.
    std::int64_t num_parts() const { return (value_size_ + kPanelRows - 1) / kPanelRows; }

    static const U32x16* words_of(const std::vector<CacheLine>& lines, std::int64_t at) {
        return reinterpret_cast<const U32x16*>(lines.data() + at);
    }

    // Pairs of slots, rounded up to a multiple of kPairsPerTile.
    std::int64_t slot_pairs() const {
        const std::int64_t slots = 2 * kPairsPerTile;
        return (count_ + slots - 1) / slots * kPairsPerTile;
    }

    // Finds slots, and reads scales and numbers of bytes.
    void find(SlotPointers& slots, const KvContext& context, std::int64_t head, int key_or_value,
              std::int64_t first, std::int64_t end) {
        slots.find(context, head, key_or_value, first, end);
        if (!has_scales_) return;
        scales_.read(context.kv, context.layer, slots, key_or_value, head);
        slots.widen(context.kv, widened_);
    }

    // Packs slots whose keys contain their values. Meanwhile it prefetches the slots after them.
    void pack_latents(const SlotPointers& slots) {
        next_ = 0;
        if (has_scales_) std::copy_n(scales_.keys, kScoreTileSlots, scales_.values);
        for (int slot = 0; slot < 2 * slot_pairs(); slot += 8) {
            const int ahead = std::min<int>(slot + 8, kScoreTileSlots - 8);
            if (slot < count_) pack_keys(slots.at + slot, slots.at + ahead, slot);
            for (int i = 0; i < 8; i += 2) pack_values(slots.at + slot + i, (slot + i) / 2);
        }
    }

    // Packs the keys of eight slots, and prefetches the numbers at a distance of next_ from
    // `ahead`.
    void pack_keys(const Bf16* const* keys, const Bf16* const* ahead, int first) {
        std::int64_t pair = 0;
        for (; pair + 8 <= pairs(); pair += 8) {
            U32x8 rows[8];
            for (int i = 0; i < 8; ++i) {
                const Bf16* from = keys[i] + 2 * pair;
                std::memcpy(&rows[i], from, sizeof rows[i]);
                if (pair % 16 == 0) prefetch(ahead[i] + 2 * pair + next_);
            }
            transpose(rows);
            for (int i = 0; i < 8; ++i)
                std::memcpy(key_at(first, pair + i), &rows[i], sizeof rows[i]);
        }
        for (; pair < pairs(); ++pair)
            for (int i = 0; i < 8; ++i)
                std::memcpy(key_at(first + i, pair), keys[i] + 2 * pair, sizeof(std::uint32_t));
    }

    // Packs the values of two slots.
    void pack_values(const Bf16* const* values, int pair) {
        std::int64_t d = 0;
        for (; d + kLanes <= value_size_; d += kLanes) {
            const U32x16 both = zero_extend(values[0] + d) | zero_extend(values[1] + d) << 16;
            std::memcpy(value_at(d, pair), &both, sizeof both);
            for (int i = 0; next_ > 0 && d % 32 == 0 && i < 2; ++i) prefetch(values[i] + d + next_);
        }
        for (; d < value_size_; ++d)
            *value_at(d, pair) = std::uint32_t(values[0][d]) | std::uint32_t(values[1][d]) << 16;
    }

    static void prefetch(const Bf16* numbers) { __builtin_prefetch(numbers, 0, 2); }

    std::uint32_t* key_at(std::int64_t slot, std::int64_t pair) {
        const std::int64_t within = slot % kPanelRows;
        CacheLine* lines = keys_.data() + slot / kPanelRows * kVectors * pairs();
        return lines[vector_at(pair, within / kLanes, pairs())].words + within % kLanes;
    }

    std::uint32_t* value_at(std::int64_t d, int pair) {
        const std::int64_t within = d % kPanelRows;
        CacheLine* lines = values_.data() + d / kPanelRows * kPartLines;
        return lines[vector_at(pair, within / kLanes, kScoreTileSlots / 2)].words + within % kLanes;
    }

    std::int64_t size_, value_size_, count_ = 0;  // of keys and values; slots
    std::int64_t next_ = 0;                       // distance to the next head
    std::vector<CacheLine> keys_, values_;
    bool has_scales_ = false;
    SlotScales scales_;
    AlignedVector<Bf16> widened_;
};

}  // namespace baton
