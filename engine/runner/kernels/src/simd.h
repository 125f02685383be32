// Vectors of sixteen lanes on any machine: the compiler splits them into registers as needed.
#pragma once

#include "abi.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace baton {

constexpr int kLanes = 16;
typedef float F32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::uint32_t U32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::int32_t I32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::uint16_t U16x16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef float F32x8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::uint32_t U32x8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::int32_t I32x8 __attribute__((vector_size(32), aligned(4), may_alias));

// Lanes of one register. Compilers split some operations on wider vectors lane by lane, or go
// through memory, so these operations use one register at a time.
#if defined(__AVX512BF16__)
constexpr int kRegLanes = kLanes;
#elif defined(__AVX2__)
constexpr int kRegLanes = 8;
#else
constexpr int kRegLanes = 4;
#endif
typedef float F32Reg __attribute__((vector_size(4 * kRegLanes), aligned(4), may_alias));
typedef std::uint32_t U32Reg __attribute__((vector_size(4 * kRegLanes), aligned(4), may_alias));
typedef std::int32_t I32Reg __attribute__((vector_size(4 * kRegLanes), aligned(4), may_alias));
typedef std::uint16_t U16Reg __attribute__((vector_size(2 * kRegLanes), aligned(2), may_alias));

// Overloads instead of a template: a template argument would lose the alignment attribute.
inline F32Reg& reg(F32x16& numbers, int index) {
    return reinterpret_cast<F32Reg*>(&numbers)[index];
}
inline U32Reg& reg(U32x16& words, int index) { return reinterpret_cast<U32Reg*>(&words)[index]; }
inline I32Reg& reg(I32x16& numbers, int index) {
    return reinterpret_cast<I32Reg*>(&numbers)[index];
}
inline U16Reg& reg(U16x16& halves, int index) { return reinterpret_cast<U16Reg*>(&halves)[index]; }

template <typename Step>
inline void for_each_reg(Step step) {
    for (int index = 0; index < kLanes / kRegLanes; ++index) step(index);
}

// Applies a function to each register.
template <typename Function>
[[gnu::always_inline]] inline F32x16 map_regs(F32x16 numbers, Function function) {
    for_each_reg([&](int i) { reg(numbers, i) = function(reg(numbers, i)); });
    return numbers;
}

inline F32x16 splat(float number) {
    F32x16 numbers;
    for_each_reg([&](int i) { reg(numbers, i) = F32Reg{} + number; });
    return numbers;
}

// Mask with all bits set in the lanes where the comparison holds.
template <typename Compare>
inline U32x16 compare_mask(F32x16 left, F32x16 right, Compare compare) {
    U32x16 lanes;
    for_each_reg([&](int i) {
        const F32Reg a = reg(left, i), b = reg(right, i);
        reg(lanes, i) = (U32Reg)compare(a, b);
    });
    return lanes;
}

inline U32x16 less_mask(F32x16 left, F32x16 right) {
    return compare_mask(left, right, [](auto a, auto b) { return a < b; });
}

inline U32x16 nan_mask(F32x16 numbers) {
    return compare_mask(numbers, numbers, [](auto a, auto b) { return a != b; });
}

inline F32x16 blend(U32x16 mask, F32x16 if_set, F32x16 if_clear) {
    return (F32x16)(((U32x16)if_set & mask) | ((U32x16)if_clear & ~mask));
}

inline F32x16 lane_max(F32x16 left, F32x16 right) {
    F32x16 numbers;
    for_each_reg([&](int i) {
        const F32Reg a = reg(left, i), b = reg(right, i);
        reg(numbers, i) = a > b ? a : b;
    });
    return numbers;
}

inline F32x16 rsqrt(F32x16 numbers) {
    for_each_reg([&](int i) {
        for (int lane = 0; lane < kRegLanes; ++lane)
            reg(numbers, i)[lane] = 1.0f / std::sqrt(reg(numbers, i)[lane]);
    });
    return numbers;
}

inline float bf16_to_f32(Bf16 value) {
    const std::uint32_t bits = std::uint32_t(value) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

// Rounds to nearest, ties to even, as torch does. A NaN stays a NaN.
inline Bf16 f32_to_bf16(float number) {
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if (std::isnan(number)) return Bf16(bits >> 16 | 0x40);
    return Bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float round_to_bf16(float number) { return bf16_to_f32(f32_to_bf16(number)); }

// Zero-extends sixteen bf16 bit patterns to 32 bits.
inline U32x16 zero_extend(const Bf16* values) {
#if defined(__AVX512BF16__)
    return (U32x16)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)values));
#else
    U32x16 wider;
    for_each_reg([&](int i) {
        U16Reg halves;
        std::memcpy(&halves, values + i * kRegLanes, sizeof halves);
        reg(wider, i) = __builtin_convertvector(halves, U32Reg);
    });
    return wider;
#endif
}

// Zero-extends sixteen bytes to 32 bits.
inline U32x16 zero_extend(const std::uint8_t* bytes) {
#if defined(__AVX512BF16__)
    return (U32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
#elif defined(__AVX2__)
    U32x16 wider;
    for_each_reg([&](int i) {
        const auto narrow = _mm_loadl_epi64((const __m128i*)(bytes + i * kRegLanes));
        reg(wider, i) = (U32Reg)_mm256_cvtepu8_epi32(narrow);
    });
    return wider;
#else
    typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes narrow;
    std::memcpy(&narrow, bytes, sizeof narrow);
    return __builtin_convertvector(narrow, U32x16);
#endif
}

// Sign-extends sixteen bytes to 32 bits.
inline I32x16 sign_extend(const std::int8_t* bytes) {
#if defined(__AVX512BF16__)
    return (I32x16)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)bytes));
#elif defined(__AVX2__)
    I32x16 wider;
    for_each_reg([&](int i) {
        const auto narrow = _mm_loadl_epi64((const __m128i*)(bytes + i * kRegLanes));
        reg(wider, i) = (I32Reg)_mm256_cvtepi8_epi32(narrow);
    });
    return wider;
#else
    typedef std::int8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes narrow;
    std::memcpy(&narrow, bytes, sizeof narrow);
    return __builtin_convertvector(narrow, I32x16);
#endif
}

inline F32x16 bf16_to_f32(const Bf16* values) { return (F32x16)(zero_extend(values) << 16); }

inline F32x16 to_f32(I32x16 whole) {
    F32x16 numbers;
    for_each_reg([&](int i) {
        const I32Reg value = reg(whole, i);
        reg(numbers, i) = __builtin_convertvector(value, F32Reg);
    });
    return numbers;
}

// Exact. A subnormal float16 is a normal float32.
inline float f16_to_f32(std::uint16_t value) {
    const std::uint32_t magnitude = (value & 0x7fffu) << 13, sign = (value & 0x8000u) << 16;
    float number;
    std::memcpy(&number, &magnitude, sizeof number);
    number *= 0x1p112f;  // the difference of the exponent biases
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if ((value & 0x7c00u) == 0x7c00u) bits = magnitude | 0x7f800000u;  // infinity or NaN
    bits |= sign;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

inline F32x16 f16_to_f32(const std::uint16_t* values) {
#if defined(__AVX512BF16__)
    return (F32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)values));
#else
    F32x16 numbers;
    for_each_reg([&](int i) {
#if defined(__AVX2__)
        const auto halves = _mm_loadu_si128((const __m128i*)(values + i * kRegLanes));
        reg(numbers, i) = (F32Reg)_mm256_cvtph_ps(halves);
#else
        for (int lane = 0; lane < kRegLanes; ++lane)
            reg(numbers, i)[lane] = f16_to_f32(values[i * kRegLanes + lane]);
#endif
    });
    return numbers;
#endif
}

#if !defined(__AVX512BF16__)
// The rounded bf16 numbers, as 32 bits.
inline U32Reg rounded_bits(F32Reg numbers) {
    const U32Reg bits = (U32Reg)numbers, is_nan = (U32Reg)(numbers != numbers);
    const U32Reg kept = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (kept & ~is_nan) | ((bits >> 16 | 0x40) & is_nan);
}
#endif

// Rounds as `f32_to_bf16` does, except that AVX-512-BF16 flushes numbers below 2^-126 to zero.
inline void store(Bf16* target, F32x16 numbers) {
#if defined(__AVX512BF16__)
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)numbers);
#elif defined(__AVX2__)
    const auto low = (__m256i)rounded_bits(reg(numbers, 0));
    const auto high = (__m256i)rounded_bits(reg(numbers, 1));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
#else
    U16x16 halves;
    for_each_reg([&](int i) {
        reg(halves, i) = __builtin_convertvector(rounded_bits(reg(numbers, i)), U16Reg);
    });
#endif
    std::memcpy(target, &halves, sizeof halves);
}

// Rounds and stores 32 numbers, in one instruction where the processor has it.
inline void store(Bf16* target, F32x16 low, F32x16 high) {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    std::memcpy(target, &both, sizeof both);
#else
    store(target, low);
    store(target + kLanes, high);
#endif
}

inline F32x16 round_to_bf16(F32x16 numbers) {
#if defined(__AVX512BF16__)
    const auto halves = (__m256i)_mm512_cvtneps_pbh((__m512)numbers);
    return (F32x16)((U32x16)_mm512_cvtepu16_epi32(halves) << 16);
#else
    Bf16 halves[kLanes];
    store(halves, numbers);
    return bf16_to_f32(halves);
#endif
}

// Rounds to the nearest integers, ties to even.
inline I32x16 round_to_int(F32x16 numbers) {
#if defined(__AVX512BF16__)
    return (I32x16)_mm512_cvtps_epi32((__m512)numbers);
#else
    I32x16 whole;
    for_each_reg([&](int i) {
        const F32Reg value = reg(numbers, i);
#if defined(__AVX2__)
        reg(whole, i) = (I32Reg)_mm256_cvtps_epi32((__m256)value);
#else
        I32Reg& rounded = reg(whole, i);
        for (int lane = 0; lane < kRegLanes; ++lane)
            rounded[lane] = int(std::nearbyint(value[lane]));
#endif
    });
    return whole;
#endif
}

// Reduces by halves to one number, in the same order on every machine.
template <typename Op>
inline float reduce(F32x16 numbers, Op op) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight eights[2];
    std::memcpy(eights, &numbers, sizeof eights);
    const Eight eight = op(eights[0], eights[1]);
    Four fours[2];
    std::memcpy(fours, &eight, sizeof fours);
    const Four four = op(fours[0], fours[1]);
    return op(op(four[0], four[2]), op(four[1], four[3]));
}

inline float sum(F32x16 numbers) {
    return reduce(numbers, [](auto left, auto right) { return left + right; });
}

inline float reduce_max(F32x16 numbers) {
    return reduce(numbers, [](auto left, auto right) { return left > right ? left : right; });
}

// Shuffle of two vectors. Indices from eight on select from `other`.
template <int... PLACES>
inline U32x8 shuffle(U32x8 a, U32x8 b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, PLACES...);
#else
    return __builtin_shuffle(a, b, U32x8{PLACES...});
#endif
}

// Transposes eight rows of eight words.
inline void transpose(U32x8 (&rows)[8]) {
    U32x8 twos[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        twos[i] = shuffle<0, 8, 1, 9, 4, 12, 5, 13>(rows[i], rows[i + 1]);
        twos[i + 1] = shuffle<2, 10, 3, 11, 6, 14, 7, 15>(rows[i], rows[i + 1]);
    }
    for (const int i : {0, 1, 4, 5}) {
        const int to = i / 4 * 4 + i % 4 * 2;
        fours[to] = shuffle<0, 1, 8, 9, 4, 5, 12, 13>(twos[i], twos[i + 2]);
        fours[to + 1] = shuffle<2, 3, 10, 11, 6, 7, 14, 15>(twos[i], twos[i + 2]);
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = shuffle<0, 1, 2, 3, 8, 9, 10, 11>(fours[i], fours[i + 4]);
        rows[i + 4] = shuffle<4, 5, 6, 7, 12, 13, 14, 15>(fours[i], fours[i + 4]);
    }
}

// Interleaves two rows of 32 numbers into words. The order of the words depends on the machine.
inline void interleave(const Bf16* even, const Bf16* odd, U32x16& first, U32x16& second) {
#if defined(__AVX512BF16__)
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    first = (U32x16)_mm512_unpacklo_epi16(a, b);
    second = (U32x16)_mm512_unpackhi_epi16(a, b);
#else
    first = zero_extend(even) | zero_extend(odd) << 16;
    second = zero_extend(even + kLanes) | zero_extend(odd + kLanes) << 16;
#endif
}

// Permutes 32 numbers into the order of `interleave`, and back.
inline void to_interleaved_order([[maybe_unused]] F32x16& first, [[maybe_unused]] F32x16& second) {
#if defined(__AVX512BF16__)
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    const __m512 a = (__m512)first, b = (__m512)second;
    first = (F32x16)_mm512_permutex2var_ps(a, low, b);
    second = (F32x16)_mm512_permutex2var_ps(a, high, b);
#endif
}

inline void from_interleaved_order([[maybe_unused]] F32x16& first,
                                   [[maybe_unused]] F32x16& second) {
#if defined(__AVX512BF16__)
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512 a = (__m512)first, b = (__m512)second;
    first = (F32x16)_mm512_permutex2var_ps(a, low, b);
    second = (F32x16)_mm512_permutex2var_ps(a, high, b);
#endif
}

}  // namespace baton
