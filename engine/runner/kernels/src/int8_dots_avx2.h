// Products of weights and 8-bit activations with AVX2, whose 16-bit sums hold a few products.
#pragma once

#include "int8_blocks.h"

namespace baton::int8_activations {

constexpr int kRows = 8;  // rows of a panel that are multiplied at once
using Floats = __m256;
using Integers = __m256i;

inline Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }
inline Floats multiply_add(Floats total, Floats left, float right) {
    return _mm256_fmadd_ps(left, _mm256_set1_ps(right), total);
}
inline Integers minus(Integers dots, std::int32_t number) {
    return _mm256_sub_epi32(dots, _mm256_set1_epi32(number));
}
inline Floats scaled(Integers dots, float scale) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(dots), _mm256_set1_ps(scale));
}
inline Floats multiply_add(Floats total, Floats left, Floats right) {
    return _mm256_fmadd_ps(left, right, total);
}

// The unsigned bytes of a quad of eight rows. `unit` points to the first words of these.
template <NumberFormat FORMAT>
inline __m256i quad_of(const std::uint8_t* unit, int quad) {
    constexpr bool kHasUpper = bits_of(FORMAT) == 6;
    const auto words = [&](int index) {
        const std::uint8_t* const at = unit + index * kPanelRows * sizeof(std::uint32_t);
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    };
    const __m256i four = _mm256_srli_epi16(words(kHasUpper + quad / 2), quad % 2 * 4);
    const __m256i lower = _mm256_and_si256(four, _mm256_set1_epi8(15));
    if constexpr (FORMAT == NumberFormat::kMxfp4) return (__m256i)fp4_bytes((U32x8)lower);
    if constexpr (!kHasUpper) return lower;
    const __m256i two = quad < 2 ? _mm256_slli_epi16(words(0), 4 - 2 * quad)
                                 : _mm256_srli_epi16(words(0), 2 * quad - 4);
    return _mm256_or_si256(lower, _mm256_and_si256(two, _mm256_set1_epi8(48)));
}

// Sums of two products each, in 16 bits.
inline __m256i products(__m256i weights, std::uint32_t activations) {
    return _mm256_maddubs_epi16(weights, _mm256_set1_epi32(int(activations)));
}

inline __m256i sum_pairs(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

// As many quads as can be added up in 16 bits.
constexpr int quads_per_sum(NumberFormat format) {
    const int max_number = max_number_of(format);
    const int count = max_number == 15 ? 8 : max_number == 63 ? 2 : 4;
    return count * 2 * kMaxInt8 * max_number < 1 << 15 ? count : 0;
}

// The unsigned bytes of eight rows in a block.
template <NumberFormat FORMAT, int COLUMNS>
struct Weights {
    static constexpr int kQuads = COLUMNS / 4;
    __m256i quads[kQuads];

    explicit Weights(const std::uint8_t* unit) {
        for (int first = 0; first < kQuads; first += kUnitQuads) {
            for (int i = 0; i < kUnitQuads; ++i) quads[first + i] = quad_of<FORMAT>(unit, i);
            unit += unit_words<FORMAT> * kPanelRows * sizeof(std::uint32_t);
        }
    }

    Integers dot(const ActivationBlock<COLUMNS>& block) const {
        constexpr int kStep = quads_per_sum(FORMAT);
        __m256i total;
        for (int first = 0; first < kQuads; first += kStep) {
            __m256i pairs = product(block, first);
            for (int i = first + 1; i < first + kStep; ++i)
                pairs = _mm256_add_epi16(pairs, product(block, i));
            total = first == 0 ? sum_pairs(pairs) : _mm256_add_epi32(total, sum_pairs(pairs));
        }
        return total;
    }

  private:
    __m256i product(const ActivationBlock<COLUMNS>& block, int i) const {
        return products(quads[i], block.quads[i]);
    }
};

// Dot products of a block with all rows of a panel. It reads ascending addresses.
template <NumberFormat FORMAT, int COLUMNS>
inline void dot_panel(Integers (&dots)[kPanelRows / kRows], const std::uint8_t* words,
                      const ActivationBlock<COLUMNS>& block) {
    constexpr int kSum = quads_per_sum(FORMAT);
    __m256i pairs[kPanelRows / kRows];
#pragma GCC unroll 8
    for (int quad = 0; quad < COLUMNS / 4; quad += 2) {
        const std::uint8_t* unit = words + quad / kUnitQuads * unit_words<FORMAT> * kPanelRows * 4;
        const int i = quad % kUnitQuads;
#pragma GCC unroll 8
        for (int v = 0; v < kPanelRows / kRows; ++v, unit += sizeof(__m256i)) {
            const __m256i added =
                _mm256_add_epi16(products(quad_of<FORMAT>(unit, i), block.quads[quad]),
                                 products(quad_of<FORMAT>(unit, i + 1), block.quads[quad + 1]));
            pairs[v] = quad % kSum == 0 ? added : _mm256_add_epi16(pairs[v], added);
            if ((quad + 2) % kSum != 0) continue;
            const __m256i sums = sum_pairs(pairs[v]);
            dots[v] = quad < kSum ? sums : _mm256_add_epi32(dots[v], sums);
        }
    }
}

}  // namespace baton::int8_activations
