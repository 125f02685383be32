// Keys and values as int8: a slot has a number for each dimension, and then one bf16 scale.
#pragma once

#include "simd.h"

#include <algorithm>
#include <bit>

namespace baton {

// Converts the numbers of a slot to bf16, which represents them exactly.
inline void widen(const Bf16* slot, std::int64_t size, Bf16* to) {
    const auto* const numbers = reinterpret_cast<const std::int8_t*>(slot);
    std::int64_t i = 0;
#if defined(__AVX512BF16__)
    for (; i + 32 <= size; i += 32) {
        const auto floats = [&](std::int64_t at) {
            return _mm512_cvtepi32_ps(
                _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(numbers + at))));
        };
        const __m512bh both = _mm512_cvtne2ps_pbh(floats(i + 16), floats(i));
        std::memcpy(to + i, &both, sizeof both);
    }
#endif
#if defined(__AVX2__)
    // Two numbers per word: as floats, their low halves are zero.
    for (; i + 16 <= size; i += 16) {
        const __m256i both = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)(numbers + i)));
        const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(both, 24), 24);
        const __m256i odd = _mm256_srai_epi32(both, 8);
        const __m256i low = _mm256_srli_epi32((__m256i)_mm256_cvtepi32_ps(even), 16);
        const __m256i words = _mm256_or_si256(low, (__m256i)_mm256_cvtepi32_ps(odd));
        _mm256_storeu_si256((__m256i*)(to + i), words);
    }
#endif
    for (; i < size; ++i) to[i] = Bf16(std::bit_cast<std::uint32_t>(float(numbers[i])) >> 16);
}

inline float scale_of(const Bf16* slot, std::int64_t size) { return bf16_to_f32(slot[size / 2]); }

// Smallest bf16 scale with which no number exceeds 127; NaN if a number is not finite.
inline Bf16 find_scale(const Bf16* numbers, std::int64_t size) {
    constexpr Bf16 kInf = 0x7f80, kNan = 0x7fc0;
    Bf16 highest =
        0;  // the order of bit patterns is that of absolute values, infinity and NaN last
    for (std::int64_t i = 0; i < size; ++i) highest = std::max<Bf16>(highest, numbers[i] & 0x7fff);
    if (highest >= kInf) return kNan;
    const auto bits = std::bit_cast<std::uint32_t>(bf16_to_f32(highest) / 127.0f);
    return Bf16((bits + 0xffff) >> 16);
}

// Quantizes numbers into a slot: each to the nearest multiple of the scale, ties to even.
inline void quantize(const Bf16* numbers, std::int64_t size, Bf16* slot) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: its last bit has the value one
    const Bf16 scale_bits = find_scale(numbers, size);
    const float scale = bf16_to_f32(scale_bits);
    auto* const to = reinterpret_cast<std::int8_t*>(slot);
    if (!(scale > 0.0f)) {  // all numbers are zero, or one is not finite
        std::memset(to, 0, size);
    } else {
        for (std::int64_t i = 0; i < size; ++i) {
            const float whole = bf16_to_f32(numbers[i]) / scale + kRound;
            to[i] = std::int8_t(std::bit_cast<std::uint32_t>(whole));
        }
    }
    slot[size / 2] = scale_bits;
}

}  // namespace baton
