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

// exp(x) within two units in the last place. A NaN stays a NaN; underflow becomes zero.
inline F32x16 exp(F32x16 x) {
    const F32x16 low = splat(-87.3f), high = splat(88.7f);
    const U32x16 is_low = less_mask(x, low), is_high = less_mask(high, x);
    x = blend(is_low, low, blend(is_high, high, x));
    const F32x16 shifted = x * 1.44269504f + 12582912.0f;  // its low bits are the nearest integer
    const F32x16 whole = shifted - 12582912.0f;
    const F32x16 rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    F32x16 power = splat(1.0f / 5040);
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        power = power * rest + factor;
    const U32x16 scale = ((U32x16)shifted + 127) << 23;
    const F32x16 result = power * (F32x16)scale;
    return (F32x16)((U32x16)result & ~is_low);
}

// tanh(x), off by 2e-7 at most. A NaN stays a NaN.
inline F32x16 tanh(F32x16 x) { return 1.0f - 2.0f / (1.0f + exp(2.0f * x)); }

// erf(x), off by 2e-7 at most (Abramowitz and Stegun, 7.1.26). A NaN stays a NaN.
inline F32x16 erf(F32x16 x) {
    const U32x16 sign = (U32x16)x & 0x80000000u;
    const F32x16 size = (F32x16)((U32x16)x & 0x7fffffffu);
    const F32x16 t = 1.0f / (1.0f + 0.3275911f * size);
    F32x16 power = splat(1.061405429f);
    for (const float factor : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
        power = power * t + factor;
    const F32x16 result = 1.0f - power * t * exp(-size * size);
    return (F32x16)((U32x16)result | sign);
}

inline F32x16 gelu(F32x16 x, bool is_exact) {
    if (is_exact) return 0.5f * x * (1.0f + erf(x * 0.707106781f));
    return 0.5f * x * (1.0f + tanh(0.797884561f * (x + 0.044715f * x * x * x)));
}

// 2^rest for |rest| <= 0.5, exact enough to be rounded to bf16.
inline F32x16 exp2_fraction(F32x16 rest) {
    F32x16 power = splat(0.00961812911f);
    for (const float factor : {0.0555041087f, 0.240226507f, 0.693147181f, 1.0f})
        power = power * rest + factor;
    return power;
}

// 2^x for x <= 0, exact enough to be rounded to bf16.
inline F32x16 exp2(F32x16 x) {
#if defined(__AVX512BF16__)
    const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    const F32x16 power = exp2_fraction(x - (F32x16)whole);
    return (F32x16)_mm512_scalef_ps((__m512)power, whole);  // zero for minus infinity
#else
    const U32x16 is_low = less_mask(x, splat(-126.0f));
    const F32x16 shifted = x + 12582912.0f;  // its low bits are the nearest integer
    const U32x16 scale = ((U32x16)shifted + 127) << 23;
    const F32x16 power = exp2_fraction(x - (shifted - 12582912.0f)) * (F32x16)scale;
    return (F32x16)((U32x16)power & ~is_low);
#endif
}

}  // namespace baton
