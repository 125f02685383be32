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
inline Floats scaled(Integers dots, float scale) {
    return __builtin_convertvector(dots, Floats) * scale;
}

// The unsigned bytes of four columns, in the lower bits of a vector of packed numbers.
template <NumberFormat FORMAT>
inline U32x16 bytes_of(U32x16 words) {
    if constexpr (bits_of(FORMAT) == 8) return words;
    const U32x16 codes = words & 0x0f0f0f0fu;
    return FORMAT == NumberFormat::kMxfp4 ? fp4_bytes(codes) : codes;
}

// The unsigned bytes of sixteen rows in a block.
template <NumberFormat FORMAT, int COLUMNS>
struct Weights {
    static constexpr int kQuads = COLUMNS / 4;
    U32x16 quads[kQuads];

    explicit Weights(const std::uint8_t* words) {
        constexpr int kStep = 8 / bits_of(FORMAT);
        const auto* from = reinterpret_cast<const U32x16*>(words);
        for (int i = 0; i < kQuads; i += kStep, from += kVectors) {
            quads[i] = bytes_of<FORMAT>(*from);
            if constexpr (kStep == 2) quads[i + 1] = bytes_of<FORMAT>(*from >> 4);
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
    constexpr int kStep = 8 / bits_of(FORMAT);
    const auto* from = reinterpret_cast<const U32x16*>(words);
    for (Integers& each : dots) each = Integers{};
#pragma GCC unroll 8
    for (int i = 0; i < COLUMNS / 4; i += kStep, from += kVectors) {
        prefetch_ahead(from, kVectors);
        for (int part = 0; part < kStep; ++part)
            for (int v = 0; v < kVectors; ++v)
                dot_add_int8(dots[v], bytes_of<FORMAT>(from[v] >> (4 * part)),
                             block.quads[i + part]);
    }
}

}  // namespace baton::int8_activations
