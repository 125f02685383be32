// Products of weights and 8-bit activations, in vectors of sixteen lanes.
#pragma once

#include "int8_blocks.h"

namespace baton::int8_activations {

constexpr int kRows = kLanes;
using Floats = F32x16;
using Integers = I32x16;

inline Floats load_floats(const float* from) {
    Floats numbers;
    std::memcpy(&numbers, from, sizeof numbers);
    return numbers;
}
inline Floats multiply_add(Floats total, Floats left, Floats right) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_fmadd_ps((__m512)left, (__m512)right, (__m512)total);
#else
    return total + left * right;
#endif
}
inline Floats multiply_add(Floats total, Floats left, float right) {
    return multiply_add(total, left, splat(right));
}
inline Integers minus(Integers dots, std::int32_t number) { return dots - number; }
inline Floats scaled(Integers dots, float scale) {
    return __builtin_convertvector(dots, Floats) * scale;
}

// The unsigned bytes of a quad of sixteen rows. `unit` points to the first words of these.
template <NumberFormat FORMAT>
inline U32x16 quad_of(const U32x16* unit, int quad) {
    constexpr bool kHasUpper = bits_of(FORMAT) == 6;
    const U32x16 words = unit[(kHasUpper + quad / 2) * kVectors];
    const U32x16 lower = words >> (quad % 2 * 4) & 0x0f0f0f0fu;
    if constexpr (FORMAT == NumberFormat::kMxfp4) return fp4_bytes(lower);
    if constexpr (!kHasUpper) return lower;
    const U32x16 upper = quad < 2 ? unit[0] << (4 - 2 * quad) : unit[0] >> (2 * quad - 4);
    return lower | (upper & 0x30303030u);
}

// The unsigned bytes of sixteen rows in a block.
template <NumberFormat FORMAT, int COLUMNS>
struct Weights {
    static constexpr int kQuads = COLUMNS / 4;
    U32x16 quads[kQuads];

    explicit Weights(const std::uint8_t* words) {
        const auto* unit = reinterpret_cast<const U32x16*>(words);
        for (int first = 0; first < kQuads; first += kUnitQuads) {
            for (int i = 0; i < kUnitQuads; ++i) quads[first + i] = quad_of<FORMAT>(unit, i);
            unit += unit_words<FORMAT> * kVectors;
        }
    }

    Integers dot(const ActivationBlock<COLUMNS>& block) const {
        Integers even = {}, odd = {};
        for (int i = 0; i < kQuads; i += 2) {
            dot_add_int8(even, quads[i], block.quads[i]);
            dot_add_int8(odd, quads[i + 1], block.quads[i + 1]);
        }
        return even + odd;
    }
};

// Dot products of a block with all rows of a panel. It reads ascending addresses.
template <NumberFormat FORMAT, int COLUMNS>
inline void dot_panel(Integers (&dots)[kPanelRows / kRows], const std::uint8_t* words,
                      const ActivationBlock<COLUMNS>& block) {
    constexpr int kUnitVectors = unit_words<FORMAT> * kVectors;
    const auto* unit = reinterpret_cast<const U32x16*>(words);
    for (Integers& each : dots) each = Integers{};
#pragma GCC unroll kUnroll
    for (int first = 0; first < COLUMNS / 4; first += kUnitQuads, unit += kUnitVectors) {
        prefetch_ahead(unit, kUnitVectors);
#pragma GCC unroll kUnroll
        for (int i = 0; i < kUnitQuads; ++i)
            for (int v = 0; v < kVectors; ++v)
                dot_add_int8(dots[v], quad_of<FORMAT>(unit + v, i), block.quads[first + i]);
    }
}

}  // namespace baton::int8_activations
