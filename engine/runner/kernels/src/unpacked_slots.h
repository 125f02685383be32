// Reads keys and values in place, for a few query rows: packing them would take longer than the
// products. Sums in the same order as `packed_slots.h`, lane by lane, so the bits are the same.
// `unpacked_slots_avx2.h` and `unpacked_slots_amx.h` are the implementations for AVX2 and AMX.
#pragma once

#include "kv_context.h"
#include "microkernel.h"

namespace baton {

class UnpackedSlots : public UnpackedSlotsBase<true> {
  public:
    // With more rows, slots are packed.
    static std::int64_t max_query_rows(const PagedKv& kv) {
        return kv.num_tensors == 2 && kv.head_dim % (2 * kLanes) == 0 ? 2 * kRunRows : 0;
    }

    static void pack_queries(AlignedVector<Bf16>&, int) {}  // queries need no packing

    std::int64_t num_steps() const { return (keys_.count + kStepSlots - 1) / kStepSlots; }

    // scores = queries * keys of a step.
    void score(TileConfig&, float* scores, const Bf16* queries, int count, std::int64_t head,
               std::int64_t step) const {
        constexpr Score kScore[] = {
            nullptr,
            &UnpackedSlots::score_rows<1>,
            &UnpackedSlots::score_rows<2>,
#if defined(__AVX512BF16__)
            &UnpackedSlots::score_rows<3>,
            &UnpackedSlots::score_rows<4>,
            &UnpackedSlots::score_rows<5>,
            &UnpackedSlots::score_rows<6>,
#endif
        };
        (this->*kScore[count])(scores + step * kStepSlots, queries,
                               slots_at(keys_, step, head, values_.at[0]));
    }

    // sums += weights * values of a step.
    void add(float* sums, std::int64_t sum_stride, const Bf16* weights, int count,
             std::int64_t head, std::int64_t step) const {
        constexpr Add kAdd[] = {
            nullptr,
            &UnpackedSlots::add_rows<1>,
            &UnpackedSlots::add_rows<2>,
#if defined(__AVX512BF16__)
            &UnpackedSlots::add_rows<3>,
            &UnpackedSlots::add_rows<4>,
            &UnpackedSlots::add_rows<5>,
            &UnpackedSlots::add_rows<6>,
#endif
        };
        (this->*kAdd[count])(sums, sum_stride, weights + step * kStepSlots,
                             slots_at(values_, step, head, next_keys_.at[0]));
    }

  private:
    using Score = void (UnpackedSlots::*)(float*, const Bf16*, const Slots&) const;
    using Add = void (UnpackedSlots::*)(float*, std::int64_t, const Bf16*, const Slots&) const;

    static std::uint32_t pair_at(const Bf16* numbers) {
        std::uint32_t pair;
        std::memcpy(&pair, numbers, sizeof pair);
        return pair;
    }

    // Keeps eight pairs of eight slots in registers, and prefetches the slots of the next step.
    template <int ROWS>
    void score_rows(float* scores, const Bf16* queries, const Slots& keys) const {
        const Bf16* ahead = keys.ahead;
        F32x8 acc[kStepSlots / 8][ROWS] = {};
        for (std::int64_t at = 0; at < size_; at += kLanes)
            for (int eight = 0; eight < kStepSlots / 8; ++eight) {
                U32x8 words[8];
                for (int i = 0; i < 8; ++i)
                    std::memcpy(&words[i], keys.at[eight * 8 + i] + keys.offset + at,
                                sizeof words[i]);
                for (int line = 0; line < 4; ++line, ahead += 32) __builtin_prefetch(ahead, 0, 2);
                transpose(words);
                for (int i = 0; i < 8; ++i)
                    for (int row = 0; row < ROWS; ++row) {
                        const auto query = pair_at(queries + row * size_ + at + 2 * i);
                        dot_add_bf16(acc[eight][row], words[i], U32x8{} + query);
                    }
            }
        for (int row = 0; row < ROWS; ++row)
            for (int eight = 0; eight < kStepSlots / 8; ++eight)
                std::memcpy(scores + row * kScoreTileSlots + 8 * eight, &acc[eight][row],
                            sizeof acc[eight][row]);
    }

    template <int ROWS>
    void add_rows(float* sums, std::int64_t sum_stride, const Bf16* weights,
                  const Slots& values) const {
        constexpr int kMaxSums = kRegLanes < kLanes ? 6 : 24;  // as many as registers hold
        constexpr int kAtOnce = 8 * ROWS <= kMaxSums ? 8 : 4 * ROWS <= kMaxSums ? 4 : 2;
        const Bf16* ahead = values.ahead;
        std::int64_t at = 0;
        for (; at + kAtOnce * kLanes <= size_; at += kAtOnce * kLanes)
            add_places<ROWS, kAtOnce>(sums + at, sum_stride, weights, values, at, ahead);
        for (; at < size_; at += 2 * kLanes)
            add_places<ROWS, 2>(sums + at, sum_stride, weights, values, at, ahead);
    }

    template <int ROWS, int VECTORS>
    void add_places(float* sums, std::int64_t sum_stride, const Bf16* weights, const Slots& values,
                    std::int64_t at, const Bf16*& ahead) const {
        F32x16 acc[ROWS][VECTORS];
        for (int row = 0; row < ROWS; ++row) {
            std::memcpy(acc[row], sums + row * sum_stride, sizeof acc[row]);
            for (int v = 0; v < VECTORS; v += 2) to_interleaved_order(acc[row][v], acc[row][v + 1]);
        }
        for (std::int64_t i = 0; i < values.count; i += 2) {
            const Bf16 *even = values.at[i] + values.offset + at,
                       *odd = values.at[i + 1] + values.offset + at;
            for (int v = 0; v < VECTORS; v += 2, ahead += 2 * 32) {
                __builtin_prefetch(ahead, 0, 2);
                __builtin_prefetch(ahead + 32, 0, 2);
                U32x16 first, second;
                interleave(even + v * kLanes, odd + v * kLanes, first, second);
                for (int row = 0; row < ROWS; ++row) {
                    const std::uint32_t weight = pair_at(weights + row * kScoreTileSlots + i);
                    dot_add_bf16(acc[row][v], first, weight);
                    dot_add_bf16(acc[row][v + 1], second, weight);
                }
            }
        }
        for (int row = 0; row < ROWS; ++row) {
            for (int v = 0; v < VECTORS; v += 2)
                from_interleaved_order(acc[row][v], acc[row][v + 1]);
            std::memcpy(sums + row * sum_stride, acc[row], sizeof acc[row]);
        }
    }
};

}  // namespace baton
