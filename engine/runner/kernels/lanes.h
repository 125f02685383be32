// Sixteen lanes of numbers, however the machine holds them: the compiler splits them as needed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace baton {

using Bf16 = std::uint16_t;  // its bits

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::int32_t Whole __attribute__((vector_size(64), aligned(4), may_alias));
typedef std::uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef float EightFloats __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::uint32_t EightWords __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::int32_t EightWhole __attribute__((vector_size(32), aligned(4), may_alias));

// As many lanes as a register has. Some steps compilers take lane by lane, or through memory, where
// they are asked for more at once.
#if defined(__AVX512BF16__)
constexpr int kPieceLanes = kLanes;
#elif defined(__AVX2__)
constexpr int kPieceLanes = 8;
#else
constexpr int kPieceLanes = 4;
#endif
typedef float SomeFloats __attribute__((vector_size(4 * kPieceLanes), aligned(4), may_alias));
typedef std::uint32_t SomeWords __attribute__((vector_size(4 * kPieceLanes), aligned(4), may_alias));
typedef std::int32_t SomeWhole __attribute__((vector_size(4 * kPieceLanes), aligned(4), may_alias));
typedef std::uint16_t SomeHalves __attribute__((vector_size(2 * kPieceLanes), aligned(2), may_alias));

// No template: types would lose there that they lie anywhere.
inline SomeFloats& piece(Floats& numbers, int which) {
    return reinterpret_cast<SomeFloats*>(&numbers)[which];
}
inline SomeWords& piece(Words& words, int which) {
    return reinterpret_cast<SomeWords*>(&words)[which];
}
inline SomeWhole& piece(Whole& numbers, int which) {
    return reinterpret_cast<SomeWhole*>(&numbers)[which];
}
inline SomeHalves& piece(Halves& halves, int which) {
    return reinterpret_cast<SomeHalves*>(&halves)[which];
}

template <typename Step>
inline void for_each_piece(Step step) {
    for (int which = 0; which < kLanes / kPieceLanes; ++which) step(which);
}

inline Floats fill(float number) {
    Floats numbers;
    for_each_piece([&](int i) { piece(numbers, i) = SomeFloats{} + number; });
    return numbers;
}

// All bits of the lanes in which it holds.
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

inline Floats chosen(Words lanes, Floats those, Floats others) {
    return (Floats)(((Words)those & lanes) | ((Words)others & ~lanes));
}

inline Floats larger(Floats left, Floats right) {
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

// To the nearest, ties to even, as torch rounds; a NaN stays one.
inline Bf16 narrow(float number) {
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if (std::isnan(number)) return Bf16(bits >> 16 | 0x40);
    return Bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float rounded(float number) { return wide(narrow(number)); }

// Each in the low half of a word.
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

// As `narrow` does, but where the processor rounds by itself what is below 2^-126 becomes zero.
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

// Twice as many, at once where the processor can.
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

// The nearest whole numbers, of two that are as near the even one.
inline Whole nearest(Floats numbers) {
#if defined(__AVX512BF16__)
    return (Whole)_mm512_cvtps_epi32((__m512)numbers);
#else
    Whole whole;
    for_each_piece([&](int i) {
        const SomeFloats some = piece(numbers, i);
#if defined(__AVX2__)
        piece(whole, i) = (SomeWhole)_mm256_cvtps_epi32((__m256)some);
#else
        SomeWhole& nearest = piece(whole, i);
        for (int lane = 0; lane < kPieceLanes; ++lane) nearest[lane] = int(std::nearbyint(some[lane]));
#endif
    });
    return whole;
#endif
}

// Halves are put together until one number is left: the same order on every machine.
template <typename Join>
inline float joined(Floats numbers, Join join) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight eights[2];
    std::memcpy(eights, &numbers, sizeof eights);
    const Eight eight = join(eights[0], eights[1]);
    Four fours[2];
    std::memcpy(fours, &eight, sizeof fours);
    const Four four = join(fours[0], fours[1]);
    return join(join(four[0], four[2]), join(four[1], four[3]));
}

inline float sum(Floats numbers) {
    return joined(numbers, [](auto left, auto right) { return left + right; });
}

inline float largest(Floats numbers) {
    return joined(numbers, [](auto left, auto right) { return left > right ? left : right; });
}

// Some of the words of both, those of the other counted from eight on.
template <int... PLACES>
inline EightWords picked(EightWords one, EightWords other) {
#if defined(__clang__)
    return __builtin_shufflevector(one, other, PLACES...);
#else
    return __builtin_shuffle(one, other, EightWords{PLACES...});
#endif
}

// Eight rows of eight words become eight columns.
inline void turn(EightWords (&rows)[8]) {
    EightWords twos[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        twos[i] = picked<0, 8, 1, 9, 4, 12, 5, 13>(rows[i], rows[i + 1]);
        twos[i + 1] = picked<2, 10, 3, 11, 6, 14, 7, 15>(rows[i], rows[i + 1]);
    }
    for (const int i : {0, 1, 4, 5}) {
        const int to = i / 4 * 4 + i % 4 * 2;
        fours[to] = picked<0, 1, 8, 9, 4, 5, 12, 13>(twos[i], twos[i + 2]);
        fours[to + 1] = picked<2, 3, 10, 11, 6, 7, 14, 15>(twos[i], twos[i + 2]);
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = picked<0, 1, 2, 3, 8, 9, 10, 11>(fours[i], fours[i + 4]);
        rows[i + 4] = picked<4, 5, 6, 7, 12, 13, 14, 15>(fours[i], fours[i + 4]);
    }
}

// Two rows of thirty-two, side by side in words. In which order is the machine's affair.
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

// Thirty-two numbers in the order of `zip`, and back.
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

// Each lane: total += low half of left * low half of right + the same of the high halves.
inline void add_products(EightFloats& total, EightWords left, EightWords right) {
#if defined(__AVX512BF16__)
    total = (EightFloats)_mm256_dpbf16_ps((__m256)total, (__m256bh)left, (__m256bh)right);
#else
    const EightWords high = EightWords{} + 0xffff0000u;
    total += (EightFloats)(left << 16) * (EightFloats)(right << 16);
    total += (EightFloats)(left & high) * (EightFloats)(right & high);
#endif
}

// Each lane: total += the four bytes of weights, without signs, times those of states, with signs.
inline void add_bytes(EightWhole& total, EightWords weights, EightWords states) {
    typedef std::int16_t Shorts __attribute__((vector_size(32)));
    const Shorts even = (Shorts)(weights & 0x00ff00ffu), odd = (Shorts)(weights >> 8 & 0x00ff00ffu);
    const Shorts even_states = (Shorts)(states << 8) >> 8, odd_states = (Shorts)states >> 8;
#if defined(__AVX2__)
    total += (EightWhole)_mm256_madd_epi16((__m256i)even, (__m256i)even_states);
    total += (EightWhole)_mm256_madd_epi16((__m256i)odd, (__m256i)odd_states);
#else
    // A byte times a byte fits sixteen bits.
    for (const Shorts products : {even * even_states, odd * odd_states})
        total += ((EightWhole)products << 16 >> 16) + ((EightWhole)products >> 16);
#endif
}

// The same word on the right in each lane. Where there are only eight lanes, compilers that are
// asked for sixteen at once build them one by one, in memory.
inline void add_products(Floats& total, Words left, std::uint32_t right) {
#if defined(__AVX512BF16__)
    total = (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)left, (__m512bh)(Words{} + right));
#else
    auto* const totals = reinterpret_cast<EightFloats*>(&total);
    const auto* const lefts = reinterpret_cast<const EightWords*>(&left);
    for (int i = 0; i < 2; ++i) add_products(totals[i], lefts[i], EightWords{} + right);
#endif
}

inline void add_bytes(Whole& total, Words weights, std::uint32_t states) {
#if defined(__AVX512VNNI__)
    total = (Whole)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, (__m512i)(Words{} + states));
#else
    auto* const totals = reinterpret_cast<EightWhole*>(&total);
    const auto* const some = reinterpret_cast<const EightWords*>(&weights);
    for (int i = 0; i < 2; ++i) add_bytes(totals[i], some[i], EightWords{} + states);
#endif
}

// Within two units in the last place; a NaN stays one, and what is too small becomes zero.
inline Floats exponential(Floats x) {
    const Floats low = fill(-87.3f), high = fill(88.7f);
    const Words is_low = where_less(x, low), is_high = where_less(high, x);
    x = chosen(is_low, low, chosen(is_high, high, x));
    const Floats shifted = x * 1.44269504f + 12582912.0f;  // its low bits are the nearest integer
    const Floats whole = shifted - 12582912.0f;
    const Floats rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    Floats power = fill(1.0f / 5040);
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        power = power * rest + factor;
    const Words scale = ((Words)shifted + 127) << 23;
    const Floats answer = power * (Floats)scale;
    return (Floats)((Words)answer & ~is_low);
}

// Two to the power of `rest`, which is at most a half, near enough to be rounded to bf16.
inline Floats small_power(Floats rest) {
    Floats power = fill(0.00961812911f);
    for (const float factor : {0.0555041087f, 0.240226507f, 0.693147181f, 1.0f})
        power = power * rest + factor;
    return power;
}

// For what is not above zero: two to the power of it, as near.
inline Floats power_of_two(Floats x) {
#if defined(__AVX512BF16__)
    const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    const Floats power = small_power(x - (Floats)whole);
    return (Floats)_mm512_scalef_ps((__m512)power, whole);  // of minus infinity: zero
#else
    const Words is_low = where_less(x, fill(-126.0f));
    const Floats shifted = x + 12582912.0f;  // its low bits are the nearest integer
    const Words scale = ((Words)shifted + 127) << 23;
    const Floats power = small_power(x - (shifted - 12582912.0f)) * (Floats)scale;
    return (Floats)((Words)power & ~is_low);
#endif
}

}  // namespace baton
