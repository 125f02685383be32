// Dot products and powers of vectors.
#pragma once

#include "simd.h"

namespace baton {

// Per lane: total += left.low * right.low + left.high * right.high, of bf16 halves (dpbf16).
inline void dot_add_bf16(F32x8& total, U32x8 left, U32x8 right) {
#if defined(__AVX512BF16__)
    total = (F32x8)_mm256_dpbf16_ps((__m256)total, (__m256bh)left, (__m256bh)right);
#else
    const U32x8 high = U32x8{} + 0xffff0000u;
    total += (F32x8)(left << 16) * (F32x8)(right << 16);
    total += (F32x8)(left & high) * (F32x8)(right & high);
#endif
}

// Per lane: total += dot product of four unsigned weight bytes and four signed activation bytes.
inline void dot_add_int8(I32x8& total, U32x8 weights, U32x8 activations) {
    typedef std::int16_t Shorts __attribute__((vector_size(32)));
    const Shorts even = (Shorts)(weights & 0x00ff00ffu), odd = (Shorts)(weights >> 8 & 0x00ff00ffu);
    const Shorts even_activations = (Shorts)(activations << 8) >> 8;
    const Shorts odd_activations = (Shorts)activations >> 8;
#if defined(__AVX2__)
    total += (I32x8)_mm256_madd_epi16((__m256i)even, (__m256i)even_activations);
    total += (I32x8)_mm256_madd_epi16((__m256i)odd, (__m256i)odd_activations);
#else
    // The product of two bytes fits into sixteen bits.
    for (const Shorts products : {even * even_activations, odd * odd_activations})
        total += ((I32x8)products << 16 >> 16) + ((I32x8)products >> 16);
#endif
}

// The same with one word broadcast on the right. With registers of eight lanes, compilers would
// build a broadcast vector of sixteen lanes word by word in memory, hence the halves.
inline void dot_add_bf16(F32x16& total, U32x16 left, std::uint32_t right) {
#if defined(__AVX512BF16__)
    total = (F32x16)_mm512_dpbf16_ps((__m512)total, (__m512bh)left, (__m512bh)(U32x16{} + right));
#else
    auto* const acc = reinterpret_cast<F32x8*>(&total);
    const auto* const halves = reinterpret_cast<const U32x8*>(&left);
    for (int i = 0; i < 2; ++i) dot_add_bf16(acc[i], halves[i], U32x8{} + right);
#endif
}

inline void dot_add_int8(I32x16& total, U32x16 weights, std::uint32_t activations) {
#if defined(__AVX512VNNI__)
    const auto right = (__m512i)(U32x16{} + activations);
    total = (I32x16)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, right);
#else
    auto* const acc = reinterpret_cast<I32x8*>(&total);
    const auto* const halves = reinterpret_cast<const U32x8*>(&weights);
    for (int i = 0; i < 2; ++i) dot_add_int8(acc[i], halves[i], U32x8{} + activations);
#endif
}

// Unsigned byte of each FP4 (E2M1) code: twice its value, plus kFp4Zero.
constexpr int kFp4Zero = 12;
constexpr std::uint8_t kFp4Bytes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Looks up the bytes of FP4 codes; each byte of `codes` is one code.
#if defined(__AVX2__)
inline U32x8 fp4_bytes(U32x8 codes) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)kFp4Bytes));
    return (U32x8)_mm256_shuffle_epi8(table, (__m256i)codes);
}
#endif
inline U32x16 fp4_bytes(U32x16 codes) {
#if defined(__AVX512BF16__)
    const __m128i table = _mm_loadu_si128((const __m128i*)kFp4Bytes);
    return (U32x16)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#elif defined(__AVX2__)
    auto* const halves = reinterpret_cast<U32x8*>(&codes);
    for (int i = 0; i < 2; ++i) halves[i] = fp4_bytes(halves[i]);
    return codes;
#else
    // Magnitudes 0 to 7 become 0, 1, 2, 3, 4, 6, 8, 12: from four on, the lower two bits add more.
    const U32x16 has_four = codes >> 2 & 0x01010101u, sign = codes >> 3 & 0x01010101u;
    const U32x16 lower = codes & (has_four | has_four << 1);
    const U32x16 doubled = (codes & 0x07070707u) + lower + (lower & lower << 1 & 0x02020202u);
    const U32x16 is_negative = (sign << 8) - sign;
    return kFp4Zero * 0x01010101u + doubled - ((doubled & is_negative) << 1);
#endif
}

// Functions of one register: compilers keep wider vectors in memory between operations.
namespace one_reg {

inline F32Reg exp(F32Reg x) {
    const F32Reg low = F32Reg{} - 87.3f, high = F32Reg{} + 88.7f;
    const auto is_low = x < low;
    x = is_low ? low : x;
    x = high < x ? high : x;
    const F32Reg shifted = x * 1.44269504f + 12582912.0f;  // its low bits are the nearest integer
    const F32Reg whole = shifted - 12582912.0f;
    const F32Reg rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    F32Reg power = F32Reg{} + 1.0f / 5040;
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        power = power * rest + factor;
    const U32Reg scale = ((U32Reg)shifted + 127) << 23;
    const F32Reg result = power * (F32Reg)scale;
    return (F32Reg)((U32Reg)result & ~(U32Reg)is_low);
}

inline F32Reg tanh(F32Reg x) { return 1.0f - 2.0f / (1.0f + exp(2.0f * x)); }

inline F32Reg erf(F32Reg x) {
    const U32Reg sign = (U32Reg)x & 0x80000000u;
    const F32Reg size = (F32Reg)((U32Reg)x & 0x7fffffffu);
    const F32Reg t = 1.0f / (1.0f + 0.3275911f * size);
    F32Reg power = F32Reg{} + 1.061405429f;
    for (const float factor : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
        power = power * t + factor;
    const F32Reg result = 1.0f - power * t * exp(-size * size);
    return (F32Reg)((U32Reg)result | sign);
}

// 2^rest for |rest| <= 0.5, exact enough to be rounded to bf16.
inline F32Reg exp2_fraction(F32Reg rest) {
    F32Reg power = F32Reg{} + 0.00961812911f;
    for (const float factor : {0.0555041087f, 0.240226507f, 0.693147181f, 1.0f})
        power = power * rest + factor;
    return power;
}

inline F32Reg exp2(F32Reg x) {
#if defined(__AVX512BF16__)
    const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    const F32Reg power = exp2_fraction(x - (F32Reg)whole);
    return (F32Reg)_mm512_scalef_ps((__m512)power, whole);  // zero for minus infinity
#else
    const auto is_low = x < F32Reg{} - 126.0f;
    const F32Reg shifted = x + 12582912.0f;  // its low bits are the nearest integer
    const U32Reg scale = ((U32Reg)shifted + 127) << 23;
    const F32Reg power = exp2_fraction(x - (shifted - 12582912.0f)) * (F32Reg)scale;
    return (F32Reg)((U32Reg)power & ~(U32Reg)is_low);
#endif
}

}  // namespace one_reg

// exp(x) within two units in the last place. A NaN stays a NaN; underflow becomes zero.
inline F32x16 exp(F32x16 x) { return map_regs(x, one_reg::exp); }

// tanh(x), off by 2e-7 at most. A NaN stays a NaN.
inline F32x16 tanh(F32x16 x) { return map_regs(x, one_reg::tanh); }

// GELU, with erf off by 2e-7 at most (Abramowitz and Stegun, 7.1.26). A NaN stays a NaN.
inline F32x16 gelu(F32x16 x, bool is_exact) {
    if (is_exact)
        return map_regs(
            x, [](F32Reg x) { return 0.5f * x * (1.0f + one_reg::erf(x * 0.707106781f)); });
    return map_regs(x, [](F32Reg x) {
        return 0.5f * x * (1.0f + one_reg::tanh(0.797884561f * (x + 0.044715f * x * x * x)));
    });
}

// 2^(scale * x - shift) for results up to 1, exact enough to be rounded to bf16.
[[gnu::always_inline]] inline F32x16 exp2(F32x16 x, float scale, float shift) {
    return map_regs(x, [=](F32Reg x) { return one_reg::exp2(x * scale - shift); });
}

}  // namespace baton
