// Reads keys and values in place, for a few query rows: packing them would take longer than the
// products. Sums in the same order as `packed_slots.h`, lane by lane, so the bits are the same.
// `in_place_tiles.h` is the implementation for processors with AMX.
#pragma once

#include "context.h"
#include "tiles.h"

namespace baton {

class SlotsInPlace : public PlacedSlots {
  public:
    static constexpr int kStep = 16;  // slots
    static constexpr std::int64_t kFewRows = 2 * kRunRows;

    static bool supports(const PagedKv& kv) { return kv.head_dim % (2 * kLanes) == 0; }

    static void pack_queries(AlignedVector<Bf16>&, int) {}  // queries need no packing

    std::int64_t num_steps() const { return (keys_.count + kStep - 1) / kStep; }

    // scores = queries * keys of a step.
    void score(Tiles&, float* scores, const Bf16* queries, int count, std::int64_t head,
               std::int64_t step) const {
        constexpr Score kScore[] = {
            nullptr, &SlotsInPlace::score_rows<1>, &SlotsInPlace::score_rows<2>,
#if defined(__AVX512BF16__)
            &SlotsInPlace::score_rows<3>, &SlotsInPlace::score_rows<4>,
            &SlotsInPlace::score_rows<5>, &SlotsInPlace::score_rows<6>,
#endif
        };
        (this->*kScore[count])(scores + step * kStep, queries, head * head_, step * kStep);
    }

    // sums += weights * values of a step.
    void add(float* sums, std::int64_t sum_stride, const Bf16* weights, int count,
             std::int64_t head, std::int64_t step) const {
        constexpr Add kAdd[] = {
            nullptr, &SlotsInPlace::add_rows<1>, &SlotsInPlace::add_rows<2>,
#if defined(__AVX512BF16__)
            &SlotsInPlace::add_rows<3>, &SlotsInPlace::add_rows<4>, &SlotsInPlace::add_rows<5>,
            &SlotsInPlace::add_rows<6>,
#endif
        };
        (this->*kAdd[count])(sums, sum_stride, weights + step * kStep, head * head_, step * kStep);
    }

  private:
    using Score = void (SlotsInPlace::*)(float*, const Bf16*, std::int64_t, std::int64_t) const;
    using Add = void (SlotsInPlace::*)(float*, std::int64_t, const Bf16*, std::int64_t,
                                       std::int64_t) const;

    static std::uint32_t pair_at(const Bf16* numbers) {
        std::uint32_t pair;
        std::memcpy(&pair, numbers, sizeof pair);
        return pair;
    }

    // Keeps eight pairs of eight slots in registers, and prefetches the slots of the next step.
    template <int ROWS>
    void score_rows(float* scores, const Bf16* queries, std::int64_t head, std::int64_t slot) const {
        const Bf16* const* keys = keys_.at + slot;
        const Bf16* ahead = slot + kStep < keys_.count ? keys[kStep] : values_.at[0];
        ahead += head;
        EightFloats totals[kStep / 8][ROWS] = {};
        for (std::int64_t at = 0; at < size_; at += kLanes)
            for (int eight = 0; eight < kStep / 8; ++eight) {
                EightWords words[8];
                for (int i = 0; i < 8; ++i)
                    std::memcpy(&words[i], keys[eight * 8 + i] + head + at, sizeof words[i]);
                for (int line = 0; line < 4; ++line, ahead += 32) __builtin_prefetch(ahead, 0, 2);
                transpose(words);
                for (int i = 0; i < 8; ++i)
                    for (int row = 0; row < ROWS; ++row) {
                        const auto query = pair_at(queries + row * size_ + at + 2 * i);
                        add_products(totals[eight][row], words[i], EightWords{} + query);
                    }
            }
        for (int row = 0; row < ROWS; ++row)
            for (int eight = 0; eight < kStep / 8; ++eight)
                std::memcpy(scores + row * kSlotsAtOnce + 8 * eight, &totals[eight][row],
                            sizeof totals[eight][row]);
    }

    template <int ROWS>
    void add_rows(float* sums, std::int64_t sum_stride, const Bf16* weights, std::int64_t head,
                  std::int64_t slot) const {
        constexpr int kAtOnce = 8 * ROWS <= kVectors * kMaxRows ? 8 : kVectors;
        const bool is_last = slot + kStep >= values_.count;
        const Bf16* ahead = is_last ? next_keys_.at[0] : values_.at[slot + kStep];
        ahead += head;
        std::int64_t at = 0;
        for (; at + kAtOnce * kLanes <= size_; at += kAtOnce * kLanes)
            add_places<ROWS, kAtOnce>(sums + at, sum_stride, weights, head + at, slot, ahead);
        for (; at < size_; at += 2 * kLanes)
            add_places<ROWS, 2>(sums + at, sum_stride, weights, head + at, slot, ahead);
    }

    template <int ROWS, int VECTORS>
    void add_places(float* sums, std::int64_t sum_stride, const Bf16* weights, std::int64_t at,
                    std::int64_t slot, const Bf16*& ahead) const {
        Floats totals[ROWS][VECTORS];
        for (int row = 0; row < ROWS; ++row) {
            std::memcpy(totals[row], sums + row * sum_stride, sizeof totals[row]);
            for (int v = 0; v < VECTORS; v += 2) to_zipped_order(totals[row][v], totals[row][v + 1]);
        }
        const std::int64_t end = std::min<std::int64_t>(kStep, values_.count - slot);
        for (std::int64_t i = 0; i < end; i += 2) {
            const Bf16 *even = values_.at[slot + i] + at, *odd = values_.at[slot + i + 1] + at;
            for (int v = 0; v < VECTORS; v += 2, ahead += 2 * 32) {
                __builtin_prefetch(ahead, 0, 2);
                __builtin_prefetch(ahead + 32, 0, 2);
                Words first, second;
                zip(even + v * kLanes, odd + v * kLanes, first, second);
                for (int row = 0; row < ROWS; ++row) {
                    const std::uint32_t weight = pair_at(weights + row * kSlotsAtOnce + i);
                    add_products(totals[row][v], first, weight);
                    add_products(totals[row][v + 1], second, weight);
                }
            }
        }
        for (int row = 0; row < ROWS; ++row) {
            for (int v = 0; v < VECTORS; v += 2)
                from_zipped_order(totals[row][v], totals[row][v + 1]);
            std::memcpy(sums + row * sum_stride, totals[row], sizeof totals[row]);
        }
    }
};

}  // namespace baton
