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
inline Floats scaled(Integers dots, float scale) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(dots), _mm256_set1_ps(scale));
}
inline Floats multiply_add(Floats total, Floats left, Floats right) {
    return _mm256_fmadd_ps(left, right, total);
}

// The unsigned bytes of four columns, in the lower bits of a vector of packed numbers.
template <NumberFormat FORMAT>
inline __m256i bytes_of(__m256i words) {
    if constexpr (bits_of(FORMAT) == 8) return words;
    const __m256i codes = _mm256_and_si256(words, _mm256_set1_epi8(15));
    return FORMAT == NumberFormat::kMxfp4 ? (__m256i)fp4_bytes((U32x8)codes) : codes;
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

    explicit Weights(const std::uint8_t* words) {
        constexpr int kStep = 8 / bits_of(FORMAT);
        for (int i = 0; i < kQuads; i += kStep, words += kPanelRows * sizeof(std::uint32_t)) {
            const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
            quads[i] = bytes_of<FORMAT>(word);
            if constexpr (kStep == 2) quads[i + 1] = bytes_of<FORMAT>(_mm256_srli_epi16(word, 4));
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
    constexpr int kQuads = COLUMNS / 4, kStep = 8 / bits_of(FORMAT), kSum = quads_per_sum(FORMAT);
    __m256i pairs[kPanelRows / kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kQuads; i += kStep) {
#pragma GCC unroll 8
        for (int v = 0; v < kPanelRows / kRows; ++v, words += sizeof(__m256i)) {
            const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
            __m256i added = products(bytes_of<FORMAT>(word), block.quads[i]);
            if constexpr (kStep == 2) {
                const __m256i high = bytes_of<FORMAT>(_mm256_srli_epi16(word, 4));
                added = _mm256_add_epi16(added, products(high, block.quads[i + 1]));
            }
            pairs[v] = i % kSum == 0 ? added : _mm256_add_epi16(pairs[v], added);
            if ((i + kStep) % kSum != 0) continue;
            const __m256i sums = sum_pairs(pairs[v]);
            dots[v] = i < kSum ? sums : _mm256_add_epi32(dots[v], sums);
        }
    }
}

}  // namespace baton::int8_activations
