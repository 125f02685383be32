// Activations of 8 bits, in blocks of columns with a common scale.
#pragma once

#include "quantization.h"

namespace baton::int8_activations {

constexpr int kMaxInt8 = 127;

// Where a panel's header and sums fit into registers, loops over its rows are unrolled, and blocks
// are multiplied inline. Elsewhere that is no faster, but takes long to compile: once more for each
// type of scales and offsets.
#if defined(__AVX2__)
constexpr int kUnroll = 8;
#define BATON_BLOCK inline
#else
constexpr int kUnroll = 1;
#define BATON_BLOCK [[gnu::noinline]]
#endif

// Activations of a token in COLUMNS columns.
template <int COLUMNS>
struct ActivationBlock {
    std::uint32_t quads[COLUMNS / 4];  // of signed bytes
    float scale, sum;                  // sum of the dequantized activations
    std::int32_t total;                // of the signed bytes
};

template <int COLUMNS>
ActivationBlock<COLUMNS> quantize_block(const Bf16* activations, std::int64_t count) {
    Bf16 padded[COLUMNS] = {};
    if (count < COLUMNS) {
        std::memcpy(padded, activations, count * sizeof(Bf16));
        activations = padded;
    }
    Bf16 magnitude = 0;  // without sign bits, bit patterns are ordered by magnitude
    for (int i = 0; i < COLUMNS; ++i)
        magnitude = std::max<Bf16>(magnitude, activations[i] & 0x7fff);
    // A non-finite activation makes the scale, and so the whole output row, non-finite.
    const float largest = bf16_to_f32(magnitude);
    ActivationBlock<COLUMNS> block = {
        .quads = {}, .scale = largest / kMaxInt8, .sum = largest * 0.0f, .total = 0};
    if (!(largest > 1e-30f && std::isfinite(largest))) return block;
    typedef std::int8_t Narrow __attribute__((vector_size(kLanes)));
    I32x16 sums = {};
    for (int at = 0; at < COLUMNS; at += kLanes) {
        const F32x16 numbers = bf16_to_f32(activations + at) * (kMaxInt8 / largest);
        const I32x16 whole = round_to_int(numbers);
        const Narrow bytes = __builtin_convertvector(whole, Narrow);
        std::memcpy(block.quads + at / 4, &bytes, sizeof bytes);
        sums += whole;
    }
    for (int lane = 0; lane < kLanes; ++lane) block.total += sums[lane];
    block.sum = block.scale * float(block.total);
    return block;
}

constexpr int max_number_of(NumberFormat format) {
    return format == NumberFormat::kMxfp4 ? 2 * kFp4Zero : (1 << bits_of(format)) - 1;
}

// Weights are read in units of sixteen columns, which have two words of each row, or three with the
// upper bits of 6.
constexpr int kUnitQuads = 4;
template <NumberFormat FORMAT>
constexpr int unit_words = bits_of(FORMAT) / 2;

}  // namespace baton::int8_activations
