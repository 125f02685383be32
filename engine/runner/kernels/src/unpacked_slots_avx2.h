// Reads keys and values in place with AVX2, for a few query rows. bf16 and int8 become float32 in
// registers, and queries once, so that products only broadcast their numbers; FP8 becomes bf16
// before. The result has the same bits as that of `packed_slots.h`.
#pragma once

#include "kv_context.h"
#include "microkernel.h"

namespace baton {

// Scores of ROWS rows for eight slots. GCC does not keep arrays in registers here.
template <int ROWS>
struct EightScores {
    __m256 scores = _mm256_setzero_ps();
    EightScores<ROWS - 1> others;

    BATON_INLINE void add(const float* queries, std::int64_t size, __m256 keys) {
        multiply_add(scores, keys, _mm256_broadcast_ss(queries));
        others.add(queries + size, size, keys);
    }
    BATON_INLINE void store(float* to) const {
        _mm256_storeu_ps(to, scores);
        others.store(to + kScoreTileSlots);
    }
};

template <>
struct EightScores<0> {
    BATON_INLINE void add(const float*, std::int64_t, __m256) {}
    BATON_INLINE void store(float*) const {}
};

class UnpackedSlots : public UnpackedSlotsBase<false> {
  public:
    // With more rows, slots are packed. For bf16, that is cheaper than two runs.
    static std::int64_t max_query_rows(const PagedKv& kv) {
        const bool is_supported = kv.num_tensors == 2 && kv.head_dim % (2 * kLanes) == 0;
        return is_supported ? (kv.has_bytes() ? 2 * kRunRows : kRunRows) : 0;
    }

    // Converts the queries to float32.
    static void pack_queries(AlignedVector<Bf16>& queries, int) {
        const AlignedVector<Bf16> halves = queries;
        queries.resize(2 * halves.size());
        for (std::size_t i = 0; i < halves.size(); ++i) {
            const float number = bf16_to_f32(halves[i]);
            std::memcpy(queries.data() + 2 * i, &number, sizeof number);
        }
    }

    std::int64_t num_steps() const { return (keys_.count + kStepSlots - 1) / kStepSlots; }

    // scores = queries * keys of a step.
    void score(TileConfig&, float* scores, const Bf16* queries, int count, std::int64_t head,
               std::int64_t step) const {
        const auto* const numbers = reinterpret_cast<const float*>(queries);
        const Slots keys = slots_at(keys_, step, head, values_.at[0]);
        with_constants(count, [&](auto rows, auto is_int8) {
            score_rows<rows, is_int8>(scores + step * kStepSlots, numbers, size_, keys);
        });
    }

    // sums += weights * values of a step.
    void add(float* sums, std::int64_t sum_stride, const Bf16* weights, int count,
             std::int64_t head, std::int64_t step) const {
        const FloatBlock block(weights + step * kStepSlots, kScoreTileSlots, count, kStepSlots / 2);
        const Slots values = slots_at(values_, step, head, next_keys_.at[0]);
        with_constants(count, [&](auto rows, auto is_int8) {
            add_rows<rows, is_int8>(sums, sum_stride, block.numbers(), size_, values);
        });
    }

  private:
    static const char* bytes_of(const Slots& slots, std::int64_t slot) {
        return reinterpret_cast<const char*>(slots.at[slot] + slots.offset);
    }

    // Calls `act` with the number of rows, and with whether slots are int8, as constants.
    template <int MOST = kRunRows, typename Act>
    void with_constants(int count, Act act) const {
        const std::integral_constant<int, MOST> rows;
        if (count == MOST && kv_.is_int8) return act(rows, std::true_type{});
        if (count == MOST) return act(rows, std::false_type{});
        if constexpr (MOST > 1) with_constants<MOST - 1>(count, act);
    }

    // A number of each of eight slots, from words of two bf16 or four int8.
    template <bool IS_INT8, int PLACE>
    BATON_INLINE static __m256 number_at(const U32x8* words) {
        if constexpr (!IS_INT8) return PLACE == 0 ? low_halves(words) : high_halves(words);
        const __m256i first = _mm256_slli_epi32((__m256i)*words, 24 - 8 * PLACE);
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(first, 24));
    }

    template <int ROWS, bool IS_INT8>
    [[gnu::noinline]] static void score_rows(float* scores, const float* queries, std::int64_t size,
                                             const Slots& keys) {
        constexpr std::int64_t kItemSize = IS_INT8 ? 1 : 2, kNumbers = 32 / kItemSize;
        const char* ahead = reinterpret_cast<const char*>(keys.ahead);
        for (int eight = 0; eight < kStepSlots; eight += 8) {
            EightScores<ROWS> acc;
            for (std::int64_t at = 0; at < size; at += kNumbers) {
                U32x8 words[8];
                for (int i = 0; i < 8; ++i)
                    std::memcpy(&words[i], bytes_of(keys, eight + i) + at * kItemSize,
                                sizeof words[i]);
                for (int line = 0; line < 4; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
                transpose(words);
                const float* numbers = queries + at;
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i, numbers += 4 / kItemSize) {
                    acc.add(numbers, size, number_at<IS_INT8, 0>(words + i));
                    acc.add(numbers + 1, size, number_at<IS_INT8, 1>(words + i));
                    if constexpr (!IS_INT8) continue;
                    acc.add(numbers + 2, size, number_at<IS_INT8, 2>(words + i));
                    acc.add(numbers + 3, size, number_at<IS_INT8, 3>(words + i));
                }
            }
            acc.store(scores + eight);
        }
    }

    // Eight numbers of a slot.
    template <bool IS_INT8>
    BATON_INLINE static __m256 eight_at(const char* bytes) {
        if constexpr (IS_INT8) {
            const __m128i numbers = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
            return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers));
        }
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }

    template <int ROWS, bool IS_INT8>
    [[gnu::noinline]] static void add_rows(float* sums, std::int64_t sum_stride,
                                           const float* weights, std::int64_t size,
                                           const Slots& values) {
        constexpr std::int64_t kItemSize = IS_INT8 ? 1 : 2;
        const char* ahead = reinterpret_cast<const char*>(values.ahead);
        for (std::int64_t at = 0; at < size; at += kLanes) {
            FloatSums<ROWS> acc;
            acc.load(sums + at, sum_stride);
            for (int slot = 0; slot < kStepSlots; ++slot) {
                const char* const bytes = bytes_of(values, slot) + at * kItemSize;
                acc.add(weights + slot, eight_at<IS_INT8>(bytes),
                        eight_at<IS_INT8>(bytes + 8 * kItemSize));
                if (slot % (4 / kItemSize) == 0) __builtin_prefetch(ahead, 0, 2), ahead += 64;
            }
            acc.store(sums + at, sum_stride);
        }
    }
};

}  // namespace baton
