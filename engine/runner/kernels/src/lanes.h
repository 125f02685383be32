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
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef float EightFloats __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::uint32_t EightWords __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::int32_t EightInts __attribute__((vector_size(32), aligned(4), may_alias));

// Lanes of one register. Compilers split some operations on wider vectors lane by lane, or go
// through memory, so these operations use pieces of this size.
#if defined(__AVX512BF16__)
constexpr int kPieceLanes = kLanes;
#elif defined(__AVX2__)
constexpr int kPieceLanes = 8;
#else
constexpr int kPieceLanes = 4;
#endif
typedef float SomeFloats __attribute__((vector_size(4 * kPieceLanes), aligned(4), may_alias));
typedef std::uint32_t SomeWords __attribute__((vector_size(4 * kPieceLanes), aligned(4), may_alias));
typedef std::int32_t SomeInts __attribute__((vector_size(4 * kPieceLanes), aligned(4), may_alias));
typedef std::uint16_t SomeHalves __attribute__((vector_size(2 * kPieceLanes), aligned(2), may_alias));

// Overloads instead of a template: a template argument would lose the alignment attribute.
inline SomeFloats& piece(Floats& numbers, int which) {
    return reinterpret_cast<SomeFloats*>(&numbers)[which];
}
inline SomeWords& piece(Words& words, int which) {
    return reinterpret_cast<SomeWords*>(&words)[which];
}
inline SomeInts& piece(Ints& numbers, int which) {
    return reinterpret_cast<SomeInts*>(&numbers)[which];
}
inline SomeHalves& piece(Halves& halves, int which) {
    return reinterpret_cast<SomeHalves*>(&halves)[which];
}

template <typename Step>
inline void for_each_piece(Step step) {
    for (int which = 0; which < kLanes / kPieceLanes; ++which) step(which);
}

inline Floats splat(float number) {
    Floats numbers;
    for_each_piece([&](int i) { piece(numbers, i) = SomeFloats{} + number; });
    return numbers;
}

// Mask with all bits set in the lanes where `holds`.
template <typename Holds>
inline Words lanes_where(Floats left, Floats right, Holds holds) {
    Words lanes;
    for_each_piece([&](int i) {
        const SomeFloats one = piece(left, i), other = piece(right, i);
        piece(lanes, i) = (SomeWords)holds(one, other);
    });
    return lanes;
}

inline Words where_less(Floats left, Floats right) {
    return lanes_where(left, right, [](auto one, auto other) { return one < other; });
}

inline Words where_nan(Floats numbers) {
    return lanes_where(numbers, numbers, [](auto one, auto other) { return one != other; });
}

inline Floats blend(Words lanes, Floats those, Floats others) {
    return (Floats)(((Words)those & lanes) | ((Words)others & ~lanes));
}

inline Floats lane_max(Floats left, Floats right) {
    Floats numbers;
    for_each_piece([&](int i) {
        const SomeFloats one = piece(left, i), other = piece(right, i);
        piece(numbers, i) = one > other ? one : other;
    });
    return numbers;
}

inline Floats inverse_roots(Floats numbers) {
    for_each_piece([&](int i) {
        for (int lane = 0; lane < kPieceLanes; ++lane)
            piece(numbers, i)[lane] = 1.0f / std::sqrt(piece(numbers, i)[lane]);
    });
    return numbers;
}

inline float wide(Bf16 value) {
    const std::uint32_t bits = std::uint32_t(value) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

// Rounds to nearest, ties to even, as torch does. A NaN stays a NaN.
inline Bf16 narrow(float number) {
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if (std::isnan(number)) return Bf16(bits >> 16 | 0x40);
    return Bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float rounded(float number) { return wide(narrow(number)); }

// Zero-extends sixteen bf16 bit patterns to 32 bits.
inline Words words(const Bf16* values) {
#if defined(__AVX512BF16__)
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)values));
#else
    Words wider;
    for_each_piece([&](int i) {
        SomeHalves halves;
        std::memcpy(&halves, values + i * kPieceLanes, sizeof halves);
        piece(wider, i) = __builtin_convertvector(halves, SomeWords);
    });
    return wider;
#endif
}

inline Floats wide(const Bf16* values) { return (Floats)(words(values) << 16); }

// Rounds as `narrow` does, except that AVX-512-BF16 flushes numbers below 2^-126 to zero.
inline void store(Bf16* target, Floats numbers) {
#if defined(__AVX512BF16__)
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)numbers);
#else
    const Words bits = (Words)numbers;
    const Words kept = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words is_nan = where_nan(numbers);
    Words narrowed = (kept & ~is_nan) | ((bits >> 16 | 0x40) & is_nan);
    Halves halves;
    for_each_piece([&](int i) {
        const SomeWords some = piece(narrowed, i);
        piece(halves, i) = __builtin_convertvector(some, SomeHalves);
    });
#endif
    std::memcpy(target, &halves, sizeof halves);
}

// Rounds and stores 32 numbers, in one instruction where the processor has it.
inline void store(Bf16* target, Floats low, Floats high) {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    std::memcpy(target, &both, sizeof both);
#else
    store(target, low);
    store(target + kLanes, high);
#endif
}

inline Floats rounded(Floats numbers) {
#if defined(__AVX512BF16__)
    const auto halves = (__m256i)_mm512_cvtneps_pbh((__m512)numbers);
    return (Floats)((Words)_mm512_cvtepu16_epi32(halves) << 16);
#else
    Bf16 halves[kLanes];
    store(halves, numbers);
    return wide(halves);
#endif
}

// Rounds to the nearest integers, ties to even.
inline Ints nearest(Floats numbers) {
#if defined(__AVX512BF16__)
    return (Ints)_mm512_cvtps_epi32((__m512)numbers);
#else
    Ints whole;
    for_each_piece([&](int i) {
        const SomeFloats some = piece(numbers, i);
#if defined(__AVX2__)
        piece(whole, i) = (SomeInts)_mm256_cvtps_epi32((__m256)some);
#else
        SomeInts& nearest = piece(whole, i);
        for (int lane = 0; lane < kPieceLanes; ++lane) nearest[lane] = int(std::nearbyint(some[lane]));
#endif
    });
    return whole;
#endif
}

// Reduces by halves to one number, in the same order on every machine.
template <typename Op>
inline float reduce(Floats numbers, Op op) {
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

inline float sum(Floats numbers) {
    return reduce(numbers, [](auto left, auto right) { return left + right; });
}

inline float reduce_max(Floats numbers) {
    return reduce(numbers, [](auto left, auto right) { return left > right ? left : right; });
}

// Shuffle of two vectors. Indices from eight on select from `other`.
template <int... PLACES>
inline EightWords shuffle(EightWords one, EightWords other) {
#if defined(__clang__)
    return __builtin_shufflevector(one, other, PLACES...);
#else
    return __builtin_shuffle(one, other, EightWords{PLACES...});
#endif
}

// Transposes eight rows of eight words.
inline void transpose(EightWords (&rows)[8]) {
    EightWords twos[8], fours[8];
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
inline void zip(const Bf16* even, const Bf16* odd, Words& first, Words& second) {
#if defined(__AVX512BF16__)
    const __m512i one = _mm512_loadu_si512(even), other = _mm512_loadu_si512(odd);
    first = (Words)_mm512_unpacklo_epi16(one, other);
    second = (Words)_mm512_unpackhi_epi16(one, other);
#else
    first = words(even) | words(odd) << 16;
    second = words(even + kLanes) | words(odd + kLanes) << 16;
#endif
}

// Permutes 32 numbers into the order of `zip`, and back.
inline void to_zipped_order([[maybe_unused]] Floats& first, [[maybe_unused]] Floats& second) {
#if defined(__AVX512BF16__)
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    const __m512 one = (__m512)first, other = (__m512)second;
    first = (Floats)_mm512_permutex2var_ps(one, low, other);
    second = (Floats)_mm512_permutex2var_ps(one, high, other);
#endif
}

inline void from_zipped_order([[maybe_unused]] Floats& first, [[maybe_unused]] Floats& second) {
#if defined(__AVX512BF16__)
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512 one = (__m512)first, other = (__m512)second;
    first = (Floats)_mm512_permutex2var_ps(one, low, other);
    second = (Floats)_mm512_permutex2var_ps(one, high, other);
#endif
}

// Per lane: total += left.low * right.low + left.high * right.high, of bf16 halves (dpbf16).
inline void add_products(EightFloats& total, EightWords left, EightWords right) {
#if defined(__AVX512BF16__)
    total = (EightFloats)_mm256_dpbf16_ps((__m256)total, (__m256bh)left, (__m256bh)right);
#else
    const EightWords high = EightWords{} + 0xffff0000u;
    total += (EightFloats)(left << 16) * (EightFloats)(right << 16);
    total += (EightFloats)(left & high) * (EightFloats)(right & high);
#endif
}

// Per lane: total += dot product of four unsigned weight bytes and four signed activation bytes.
inline void add_bytes(EightInts& total, EightWords weights, EightWords activations) {
    typedef std::int16_t Shorts __attribute__((vector_size(32)));
    const Shorts even = (Shorts)(weights & 0x00ff00ffu), odd = (Shorts)(weights >> 8 & 0x00ff00ffu);
    const Shorts even_activations = (Shorts)(activations << 8) >> 8;
    const Shorts odd_activations = (Shorts)activations >> 8;
#if defined(__AVX2__)
    total += (EightInts)_mm256_madd_epi16((__m256i)even, (__m256i)even_activations);
    total += (EightInts)_mm256_madd_epi16((__m256i)odd, (__m256i)odd_activations);
#else
    // The product of two bytes fits into sixteen bits.
    for (const Shorts products : {even * even_activations, odd * odd_activations})
        total += ((EightInts)products << 16 >> 16) + ((EightInts)products >> 16);
#endif
}

// The same with one word broadcast on the right. With registers of eight lanes, compilers would
// build a broadcast vector of sixteen lanes word by word in memory, hence the halves.
inline void add_products(Floats& total, Words left, std::uint32_t right) {
#if defined(__AVX512BF16__)
    total = (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)left, (__m512bh)(Words{} + right));
#else
    auto* const totals = reinterpret_cast<EightFloats*>(&total);
    const auto* const lefts = reinterpret_cast<const EightWords*>(&left);
    for (int i = 0; i < 2; ++i) add_products(totals[i], lefts[i], EightWords{} + right);
#endif
}

inline void add_bytes(Ints& total, Words weights, std::uint32_t activations) {
#if defined(__AVX512VNNI__)
    const auto right = (__m512i)(Words{} + activations);
    total = (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, right);
#else
    auto* const totals = reinterpret_cast<EightInts*>(&total);
    const auto* const some = reinterpret_cast<const EightWords*>(&weights);
    for (int i = 0; i < 2; ++i) add_bytes(totals[i], some[i], EightWords{} + activations);
#endif
}

// exp(x) within two units in the last place. A NaN stays a NaN; underflow becomes zero.
inline Floats exponential(Floats x) {
    const Floats low = splat(-87.3f), high = splat(88.7f);
    const Words is_low = where_less(x, low), is_high = where_less(high, x);
    x = blend(is_low, low, blend(is_high, high, x));
    const Floats shifted = x * 1.44269504f + 12582912.0f;  // its low bits are the nearest integer
    const Floats whole = shifted - 12582912.0f;
    const Floats rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    Floats power = splat(1.0f / 5040);
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        power = power * rest + factor;
    const Words scale = ((Words)shifted + 127) << 23;
    const Floats result = power * (Floats)scale;
    return (Floats)((Words)result & ~is_low);
}

// 2^rest for |rest| <= 0.5, exact enough to be rounded to bf16.
inline Floats small_power(Floats rest) {
    Floats power = splat(0.00961812911f);
    for (const float factor : {0.0555041087f, 0.240226507f, 0.693147181f, 1.0f})
        power = power * rest + factor;
    return power;
}

// 2^x for x <= 0, exact enough to be rounded to bf16.
inline Floats power_of_two(Floats x) {
#if defined(__AVX512BF16__)
    const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    const Floats power = small_power(x - (Floats)whole);
    return (Floats)_mm512_scalef_ps((__m512)power, whole);  // zero for minus infinity
#else
    const Words is_low = where_less(x, splat(-126.0f));
    const Floats shifted = x + 12582912.0f;  // its low bits are the nearest integer
    const Words scale = ((Words)shifted + 127) << 23;
    const Floats power = small_power(x - (shifted - 12582912.0f)) * (Floats)scale;
    return (Floats)((Words)power & ~is_low);
#endif
}

}  // namespace baton
