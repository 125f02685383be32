// Reads keys and values in place with AMX, for a few query rows. `unpacked_slots.h` is the
// implementation for processors without AMX. The result has the same bits as that of
// `packed_slots.h`.
//
// Keys are loaded unpacked as the rows of a tile; the queries are packed as its other operand.
// Values would need packing, so vectors compute their products and emulate a tile.
#pragma once

#include "amx_emulation.h"
#include "kv_context.h"
#include "microkernel.h"

namespace baton {

class UnpackedSlots : public UnpackedSlotsBase<false> {
  public:
    static constexpr int kStepSlots = 2 * kPairsPerTile;
    static constexpr int kMaxQueryRows = 8;

    // With more rows, slots are packed.
    static std::int64_t max_query_rows(const PagedKv& kv) {
        const bool is_supported = !kv.has_bytes() && kv.num_tensors == 2 &&
                                  kv.head_dim % (2 * kLanes) == 0 && kv.block_size % kTileRows == 0;
        return is_supported ? kMaxQueryRows : 0;
    }

    // Packs the queries into a panel of `count` columns.
    static void pack_queries(AlignedVector<Bf16>& queries, int count) {
        const AlignedVector<Bf16> rows = queries;
        const std::int64_t pairs = std::int64_t(rows.size()) / count / 2;
        for (int row = 0; row < count; ++row)
            for (std::int64_t pair = 0; pair < pairs; ++pair)
                std::copy_n(rows.data() + 2 * (row * pairs + pair), 2,
                            queries.data() + 2 * (pair * count + row));
    }

    std::int64_t num_steps() const { return (keys_.count + kStepSlots - 1) / kStepSlots; }

    // scores = queries * keys of a step.
    void score(TileConfig& tile_config, float* scores, const Bf16* queries, int count,
               std::int64_t head, std::int64_t step) const {
        const std::int64_t slot = step * kStepSlots, row_bytes = size_ * sizeof(Bf16);
        const std::int64_t query_bytes = count * sizeof(std::uint32_t);
        const Bf16* const upper = keys_.at[slot] + head * head_;
        // Past the last slot, loads the upper tile again: these scores are not used.
        const bool has_lower = slot + kTileRows < keys_.count;
        const Bf16* const lower = has_lower ? keys_.at[slot + kTileRows] + head * head_ : upper;
        const bool is_last = slot + kStepSlots >= keys_.count;
        const Bf16* const* const ahead = is_last ? values_.at : keys_.at + slot + kStepSlots;
        tile_config.configure(kTileRows, kTileRows, count);
        compiler_barrier();
        _tile_zero(0);
        _tile_zero(2);
        for (std::int64_t at = 0; at < size_; at += 2 * kPairsPerTile) {
            _tile_loadd(6, queries + at * count, query_bytes);
            _tile_loadd(4, upper + at, row_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, lower + at, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            for (int i = 0; i < kStepSlots; ++i)
                __builtin_prefetch(ahead[i] + head * head_ + at, 0, 2);
        }
        alignas(64) float found[kStepSlots * kMaxQueryRows];
        _tile_stored(0, found, query_bytes);
        _tile_stored(2, found + kTileRows * count, query_bytes);
        compiler_barrier();
        for (int row = 0; row < count; ++row)
            for (int i = 0; i < kStepSlots; ++i)
                scores[row * kScoreTileSlots + slot + i] = found[i * count + row];
    }

    // sums += weights * values of a step.
    void add(float* sums, std::int64_t sum_stride, const Bf16* weights, int count,
             std::int64_t head, std::int64_t step) const {
        constexpr Add kAdd[] = {nullptr, &UnpackedSlots::add_rows<1>, &UnpackedSlots::add_rows<2>,
                                &UnpackedSlots::add_rows<3>, &UnpackedSlots::add_rows<4>};
        const FlushDenormals flush_denormals;
        const std::int64_t slot = step * kStepSlots;
        const bool is_last = slot + kStepSlots >= values_.count;
        const Bf16* const* const ahead = is_last ? next_keys_.at : values_.at + slot + kStepSlots;
        for (std::int64_t at = 0; at < size_; at += 2 * kLanes)
            for (int row = 0; row < count; row += kRowsAtOnce)
                (this->*kAdd[std::min(count - row, kRowsAtOnce)])(
                    sums + row * sum_stride + at, sum_stride,
                    weights + row * kScoreTileSlots + slot, head * head_ + at, slot, ahead);
    }

  private:
    static constexpr int kRowsAtOnce = 4;
    using Add = void (UnpackedSlots::*)(float*, std::int64_t, const Bf16*, std::int64_t,
                                        std::int64_t, const Bf16* const*) const;

    // Interleaves the numbers from the low and the high halves of words.
    static void unzip(F32x16& low, F32x16& high) {
        const __m512i even =
            _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(8));
        const __m512 one = (__m512)low, other = (__m512)high;
        low = (F32x16)_mm512_permutex2var_ps(one, even, other);
        high = (F32x16)_mm512_permutex2var_ps(one, odd, other);
    }

    // Adds 32 columns of the values. The next step's slots are prefetched one by one: many
    // prefetches at a time would wait for each other.
    template <int ROWS>
    void add_rows(float* sums, std::int64_t sum_stride, const Bf16* weights, std::int64_t at,
                  std::int64_t slot, const Bf16* const* ahead) const {
        struct Two {
            F32x16 low, high;  // halves of the words
        } even[ROWS] = {}, odd[ROWS] = {};
        const std::int64_t count = std::min<std::int64_t>(kStepSlots, values_.count - slot);
        for (std::int64_t i = 0; i < count; ++i) {
            __builtin_prefetch(ahead[i] + at, 0, 2);
            U32x16 both;
            std::memcpy(&both, values_.at[slot + i] + at, sizeof both);
            const F32x16 low = low_of(both), high = high_of(both);
            for (int row = 0; row < ROWS; ++row) {
                const float weight = bf16_to_f32(weights[row * kScoreTileSlots + i]);
                Two& sum = i % 2 == 0 ? even[row] : odd[row];
                multiply_add(sum.low, weight, low);
                multiply_add(sum.high, weight, high);
            }
        }
        for (int row = 0; row < ROWS; ++row) {
            F32x16 first = even[row].low + odd[row].low, second = even[row].high + odd[row].high;
            unzip(first, second);
            F32x16 own[2];
            std::memcpy(own, sums + row * sum_stride, sizeof own);
            own[0] += first;
            own[1] += second;
            std::memcpy(sums + row * sum_stride, own, sizeof own);
        }
    }
};

}  // namespace baton
