// Keys and values with a byte for each number: int8, and then one bf16 scale; or FP8 (e4m3).
#pragma once

#include "abi.h"
#include "simd.h"

#include <algorithm>
#include <array>
#include <bit>

namespace baton {

// Converts the numbers of a slot of int8 to bf16, which represents them exactly.
inline void widen_int8(const Bf16* slot, std::int64_t size, Bf16* to) {
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

// Each number of FP8 as bf16, which represents it exactly. Without sign, the first eight are
// multiples of 2^-9; others have the same bits with another bias of the exponent, 7 instead of 127.
constexpr std::array<Bf16, 256> kFp8Numbers = [] {
    std::array<Bf16, 256> numbers{};
    for (int code = 0; code < 256; ++code) {
        const int magnitude = code & 0x7f;
        int bits = (magnitude << 4) + (120 << 7);
        if (magnitude < 8) bits = std::bit_cast<std::uint32_t>(magnitude / 512.0f) >> 16;
        if (magnitude == 0x7f) bits |= 0x7f80;  // NaN
        numbers[code] = Bf16(bits | (code & 0x80) << 8);
    }
    return numbers;
}();

// Converts the numbers of a slot of FP8 to bf16.
inline void widen_fp8(const Bf16* slot, std::int64_t size, Bf16* to) {
    const auto* const codes = reinterpret_cast<const std::uint8_t*>(slot);
    std::int64_t i = 0;
#if defined(__AVX512BF16__)
    const __m512i first = _mm512_loadu_si512(kFp8Numbers.data());
    const auto all = [](int bits) { return _mm512_set1_epi16(std::int16_t(bits)); };
    for (; i + 32 <= size; i += 32) {
        const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(codes + i)));
        const __m512i magnitude = _mm512_and_si512(wide, all(0x7f));
        __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), all(120 << 7));
        bits = _mm512_mask_permutexvar_epi16(bits, _mm512_cmplt_epi16_mask(magnitude, all(8)),
                                             magnitude, first);
        bits =
            _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epi16_mask(magnitude, all(0x7f)), all(0x7ff0));
        bits = _mm512_or_si512(bits, _mm512_and_si512(wide, all(0x8000)));
        _mm512_storeu_si512(to + i, bits);
    }
#endif
#if defined(__AVX2__)
    const auto each = [](int bits) { return _mm256_set1_epi16(std::int16_t(bits)); };
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)kFp8Numbers.data()));
    for (; i + 16 <= size; i += 16) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(codes + i)));
        const __m256i magnitude = _mm256_and_si256(wide, each(0x7f));
        const __m256i bytes = _mm256_mullo_epi16(magnitude, each(0x0202));  // of the table
        const __m256i small = _mm256_shuffle_epi8(table, _mm256_add_epi16(bytes, each(0x0100)));
        __m256i bits = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), each(120 << 7));
        bits = _mm256_blendv_epi8(bits, small, _mm256_cmpgt_epi16(each(8), magnitude));
        const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, each(0x7f));
        bits = _mm256_or_si256(bits, _mm256_and_si256(is_nan, each(0x7f80)));
        bits = _mm256_or_si256(bits, _mm256_and_si256(wide, each(0x8000)));
        _mm256_storeu_si256((__m256i*)(to + i), bits);
    }
#endif
    for (; i < size; ++i) to[i] = kFp8Numbers[codes[i]];
}

inline void widen(const PagedKv& kv, const Bf16* slot, Bf16* to) {
    kv.is_int8 ? widen_int8(slot, kv.head_dim, to) : widen_fp8(slot, kv.head_dim, to);
}

inline float int8_scale(const Bf16* slot, std::int64_t size) { return bf16_to_f32(slot[size / 2]); }

// Smallest bf16 scale with which no number exceeds 127; NaN if a number is not finite.
inline Bf16 find_int8_scale(const Bf16* numbers, std::int64_t size) {
    constexpr Bf16 kInf = 0x7f80, kNan = 0x7fc0;
    Bf16 highest =
        0;  // the order of bit patterns is that of absolute values, infinity and NaN last
    for (std::int64_t i = 0; i < size; ++i) highest = std::max<Bf16>(highest, numbers[i] & 0x7fff);
    if (highest >= kInf) return kNan;
    const auto bits = std::bit_cast<std::uint32_t>(bf16_to_f32(highest) / 127.0f);
    return Bf16((bits + 0xffff) >> 16);
}

// Quantizes numbers into a slot: each to the nearest multiple of the scale, ties to even.
inline void quantize_int8(const Bf16* numbers, std::int64_t size, Bf16* slot) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: its last bit has the value one
    const Bf16 scale_bits = find_int8_scale(numbers, size);
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

// Rounds numbers / scale to FP8, ties to even, and saturates. A NaN stays a NaN.
inline void quantize_fp8(const Bf16* numbers, std::int64_t size, float scale, Bf16* slot) {
    constexpr float kRound = 16384.0f;  // 2^14: its last bit has the value 2^-9
    constexpr auto bits_of = [](float number) { return std::bit_cast<std::uint32_t>(number); };
    auto* const to = reinterpret_cast<std::uint8_t*>(slot);
    for (std::int64_t i = 0; i < size; ++i) {
        const std::uint32_t bits = bits_of(bf16_to_f32(numbers[i]) / scale);
        const std::uint32_t exact = bits & 0x7fffffff, kept = std::min(exact, bits_of(448.0f));
        const std::uint32_t large = ((kept + 0x7ffff + (kept >> 20 & 1)) >> 20) - (120 << 3);
        const std::uint32_t small = bits_of(std::bit_cast<float>(kept) + kRound) - bits_of(kRound);
        const std::uint32_t code = kept < bits_of(0x1p-6f) ? small : large;
        to[i] = std::uint8_t((exact > 0x7f800000 ? 0x7f : code) | (bits >> 24 & 0x80));
    }
}

}  // namespace baton
