// Products of up to kRunRows rows with a panel, for AVX2: with few registers, sixteen rows of a
// panel at a time, over blocks of columns that stay in L1.
#pragma once

#include "panels.h"

namespace baton {

#define BATON_INLINE inline __attribute__((always_inline))

struct TileConfig {};

constexpr int kRunRows = kMaxRows;
constexpr int kBlockPairs = 64;  // of a panel: 16 KiB

// A block of a few rows as float32, so that products only broadcast its numbers.
class FloatBlock {
  public:
    static constexpr int kStride = 2 * kBlockPairs;

    FloatBlock(const Bf16* rows, std::int64_t stride, int count, std::int64_t pairs) {
        for (int row = 0; row < count; ++row, rows += stride) load(rows, numbers_[row], 2 * pairs);
    }
    const float* numbers() const { return numbers_[0]; }

    static void load(const Bf16* from, float* to, std::int64_t count) {
        std::int64_t at = 0;
        for (; at + 8 <= count; at += 8) {
            const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
            const __m256i words = _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
            _mm256_store_ps(to + at, _mm256_castsi256_ps(words));
        }
        for (; at < count; ++at) to[at] = bf16_to_f32(from[at]);
    }

  private:
    alignas(64) float numbers_[kMaxRows][kStride];
};

// acc += left * right. GCC would accumulate in another register and run out of registers.
BATON_INLINE void multiply_add(__m256& acc, __m256 left, __m256 right) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(left), "x"(right));
}

// first += left * pair, second += right * pair, in pairs of 16-bit integers. GCC would run out of
// registers here, too.
BATON_INLINE void multiply_add_pair(__m256i& first, __m256i& second, const void* pair, __m256i left,
                                    __m256i right) {
    __m256i numbers, products;
    asm("vpbroadcastd %[pair], %[numbers]\n\t"
        "vpmaddwd %[left], %[numbers], %[products]\n\t"
        "vpaddd %[products], %[first], %[first]\n\t"
        "vpmaddwd %[right], %[numbers], %[numbers]\n\t"
        "vpaddd %[numbers], %[second], %[second]"
        : [numbers] "=&x"(numbers), [products] "=&x"(products), [first] "+x"(first),
          [second] "+x"(second)
        :
        [pair] "m"(*static_cast<const std::uint32_t*>(pair)), [left] "x"(left), [right] "x"(right));
}

// The high halves of words, as float32. The mask stays in memory: no register is left for it.
BATON_INLINE __m256 high_halves(const U32x8* words) {
    alignas(32) static constexpr std::uint32_t kMask[] = {
        0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
        0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
    };
    __m256 halves;
    asm("vandps %2, %1, %0"
        : "=x"(halves)
        : "x"(*words), "m"(*reinterpret_cast<const __m256*>(kMask)));
    return halves;
}

BATON_INLINE __m256 low_halves(const U32x8* words) { return (__m256)(*words << 16); }

// Sums of ROWS rows for sixteen rows of a panel. GCC does not keep arrays in registers here.
template <int ROWS>
struct FloatSums {
    __m256 first, second;
    FloatSums<ROWS - 1> others;

    BATON_INLINE void load(const float* from, std::int64_t stride) {
        first = _mm256_loadu_ps(from), second = _mm256_loadu_ps(from + 8);
        others.load(from + stride, stride);
    }
    BATON_INLINE void store(float* to, std::int64_t stride) const {
        _mm256_storeu_ps(to, first), _mm256_storeu_ps(to + 8, second);
        others.store(to + stride, stride);
    }
    BATON_INLINE void add(const float* numbers, __m256 first_weights, __m256 second_weights) {
        const __m256 number = _mm256_broadcast_ss(numbers);
        multiply_add(first, first_weights, number);
        multiply_add(second, second_weights, number);
        others.add(numbers + FloatBlock::kStride, first_weights, second_weights);
    }
};

template <>
struct FloatSums<0> {
    BATON_INLINE void load(const float*, std::int64_t) {}
    BATON_INLINE void store(float*, std::int64_t) const {}
    BATON_INLINE void add(const float*, __m256, __m256) {}
};

// sums += rows * sixteen rows of a block of a panel, column by column. Prefetches one line for each
// pair if IS_FETCHING.
template <int ROWS, bool IS_FETCHING>
inline void add_sixteen(float* sums, std::int64_t sum_stride, const float* numbers,
                        const U32x16* panel, std::int64_t pairs, const U32x16* ahead) {
    FloatSums<ROWS> acc;
    acc.load(sums, sum_stride);
    for (std::int64_t pair = 0; pair < pairs; ++pair, panel += kVectors, numbers += 2) {
        if (IS_FETCHING) __builtin_prefetch(ahead + pair, 0, 2);
        const auto* const words = reinterpret_cast<const U32x8*>(panel);
        acc.add(numbers, low_halves(words), low_halves(words + 1));
        acc.add(numbers + 1, high_halves(words), high_halves(words + 1));
    }
    acc.store(sums, sum_stride);
}

using AddSixteen = void (*)(float*, std::int64_t, const float*, const U32x16*, std::int64_t,
                            const U32x16*);

template <bool IS_FETCHING>
constexpr AddSixteen kAddSixteen[] = {
    nullptr,
    add_sixteen<1, IS_FETCHING>,
    add_sixteen<2, IS_FETCHING>,
    add_sixteen<3, IS_FETCHING>,
    add_sixteen<4, IS_FETCHING>,
    add_sixteen<5, IS_FETCHING>,
    add_sixteen<6, IS_FETCHING>,
};

// sums += rows of a FloatBlock * a block of a panel. Prefetches the block at `ahead`, unless it is
// null: line by line, since memory is read fastest in order.
inline void add_block(float* sums, std::int64_t sum_stride, const float* numbers, int count,
                      const U32x16* panel, std::int64_t pairs, const U32x16* ahead = nullptr) {
    const AddSixteen add = ahead == nullptr ? kAddSixteen<false>[count] : kAddSixteen<true>[count];
    if (ahead == nullptr) ahead = panel;
    for (int v = 0; v < kVectors; ++v)
        add(sums + v * kLanes, sum_stride, numbers, panel + v, pairs, ahead + v * pairs);
}

template <Init INIT>
inline void multiply_rows(TileConfig&, float* sums, std::int64_t sum_stride, const Bf16* rows,
                          std::int64_t row_stride, int count, const U32x16* panel,
                          std::int64_t pairs) {
    for (int row = 0; INIT == Init::kZero && row < count; ++row)
        std::memset(sums + row * sum_stride, 0, kPanelRows * sizeof(float));
    for (std::int64_t pair = 0; pair < pairs; pair += kBlockPairs) {
        const std::int64_t num_pairs = std::min<std::int64_t>(kBlockPairs, pairs - pair);
        const FloatBlock block(rows + 2 * pair, row_stride, count, num_pairs);
        add_block(sums, sum_stride, block.numbers(), count, panel + pair * kVectors, num_pairs);
    }
}

}  // namespace baton
