// GEMM with packed weights of 4 or 8 bits, in vectors.
//
// The activations of a token are a row of high bytes and a row of low bytes. So the sums within a
// group of columns are exact integers, in any order. The groups are then summed in the order of the
// columns.
#pragma once

#include "gemm_quantized.h"

namespace baton::quantized {

constexpr int kMaxTokens = kMaxRows / 2;  // each token has two rows of bytes

template <int ROWS>
using IntSums = I32x16[ROWS][kVectors];

// The unsigned bytes of four columns out of a vector of packed numbers.
template <NumberFormat FORMAT, typename Words>
inline Words unpack(Words numbers, int part) {
    if (bits_of(FORMAT) == 8) return numbers;
    const Words halves = numbers >> (4 * part) & 0x0f0f0f0fu;
    return FORMAT == NumberFormat::kMxfp4 ? fp4_bytes(halves) : halves;
}

// dots += rows of bytes * the group's numbers.
template <NumberFormat FORMAT, int ROWS>
inline void add_group(IntSums<ROWS>& dots, const std::uint32_t* const (&rows)[ROWS],
                      const U32x16* numbers, std::int64_t first, std::int64_t end) {
    constexpr int kQuads = 8 / bits_of(FORMAT);
    for (std::int64_t quad = first; quad < end; quad += kQuads, numbers += kVectors) {
        prefetch_ahead(numbers, kVectors);
        for (int part = 0; part < kQuads; ++part) {
            U32x16 weights[kVectors];
            for (int v = 0; v < kVectors; ++v) weights[v] = unpack<FORMAT>(numbers[v], part);
            for (int row = 0; row < ROWS; ++row) {
                const std::uint32_t activation = rows[row][quad + part];
                for (int v = 0; v < kVectors; ++v)
                    dot_add_int8(dots[row][v], weights[v], activation);
            }
        }
    }
}

// Dequantizes the integer sums of a group, for sixteen rows of a panel.
template <NumberFormat FORMAT, ScaleType SCALE>
class Dequantizer {
  public:
    Dequantizer(const std::uint8_t* group, int v)
        : scales_(load_scales<SCALE>(group, v)),
          zeros_((I32x16)zero_extend(group + zeros_offset_of(FORMAT, SCALE) + v * kLanes)) {}

    // high, low: sums of products for the rows of high and low bytes.
    // high_sum, low_sum: sums of these bytes, which the zero points are multiplied by.
    F32x16 operator()(I32x16 high, I32x16 low, std::int32_t high_sum, std::int32_t low_sum) const {
        // Then a group has at most 256 columns, and this sum fits into 32 bits.
        if constexpr (SCALE != ScaleType::kFloat32) {
            const I32x16 both = high * 256 + low - zeros_ * (high_sum * 256 + low_sum);
            return __builtin_convertvector(both, F32x16) * scales_;
        }
        const I32x16 highs = high - zeros_ * high_sum, lows = low - zeros_ * low_sum;
        const F32x16 both =
            __builtin_convertvector(highs, F32x16) * 256.0f + __builtin_convertvector(lows, F32x16);
        return both * scales_;
    }

  private:
    F32x16 scales_;
    I32x16 zeros_;
};

// Integers with offsets: the sum of a token's activations times the offset of a row is added.
template <ScaleType SCALE>
class OffsetDequantizer {
  public:
    OffsetDequantizer(const std::uint8_t* group, int v, std::int64_t offsets)
        : scales_(load_scales<SCALE>(group, v)), offsets_(load_scales<SCALE>(group + offsets, v)) {}

    F32x16 operator()(I32x16 high, I32x16 low, std::int32_t high_sum, std::int32_t low_sum) const {
        const F32x16 highs = __builtin_convertvector(high, F32x16);
        const F32x16 both = highs * 256.0f + __builtin_convertvector(low, F32x16);
        const float sum = float(high_sum) * 256.0f + float(low_sum);
        return both * scales_ + offsets_ * sum;
    }

  private:
    F32x16 scales_, offsets_;
};

template <ScaleType SCALE>
class Dequantizer<NumberFormat::kInt8Offsets, SCALE> : public OffsetDequantizer<SCALE> {
  public:
    Dequantizer(const std::uint8_t* group, int v)
        : OffsetDequantizer<SCALE>(group, v, zeros_offset_of(NumberFormat::kInt8Offsets, SCALE)) {}
};

template <ScaleType SCALE>
class Dequantizer<NumberFormat::kInt4Offsets, SCALE> : public OffsetDequantizer<SCALE> {
  public:
    Dequantizer(const std::uint8_t* group, int v)
        : OffsetDequantizer<SCALE>(group, v, zeros_offset_of(NumberFormat::kInt4Offsets, SCALE)) {}
};

// A group of MXFP4 has 32 columns, so that the sum of both rows of bytes is below 2^24: exact.
template <>
class Dequantizer<NumberFormat::kMxfp4, ScaleType::kFloat32> {
  public:
    Dequantizer(const std::uint8_t* group, int v) : scales_(load_mxfp4_scales(group, v)) {}

    F32x16 operator()(I32x16 high, I32x16 low, std::int32_t high_sum, std::int32_t low_sum) const {
        const I32x16 both = high * 256 + low - kFp4Zero * (high_sum * 256 + low_sum);
        return __builtin_convertvector(both, F32x16) * scales_;
    }

  private:
    F32x16 scales_;
};

template <NumberFormat FORMAT, ScaleType SCALE, int TOKENS>
void multiply(const Gemm& p, QuantizedActivations& activations, std::int64_t panel,
              std::int64_t first) {
    const QuantizedLayout& layout = p.layout;
    const std::uint32_t* rows[2 * TOKENS];
    for (int t = 0; t < TOKENS; ++t)
        for (int part = 0; part < 2; ++part)
            rows[2 * t + part] = activations.quads(first + t, part);
    Accumulators<TOKENS> acc = {};
    const std::int64_t quads = layout.padded_group() / 4;
    for (std::int64_t group = 0; group < layout.num_groups(); ++group) {
        const std::uint8_t* at = p.packed + layout.group_at(panel, group);
        const auto header = [&](int v) { return Dequantizer<FORMAT, SCALE>(at, v); };
        const auto multiply_group = [&](const auto& dequantizer) {
            const auto* numbers =
                reinterpret_cast<const U32x16*>(at + header_bytes_of(FORMAT, SCALE));
            IntSums<2 * TOKENS> dots = {};
            add_group<FORMAT, 2 * TOKENS>(dots, rows, numbers, group * quads, (group + 1) * quads);
            for (int v = 0; v < kVectors; ++v) {
                const Dequantizer<FORMAT, SCALE>& dequantize = dequantizer(v);
                for (int t = 0; t < TOKENS; ++t)
                    acc[t][v] += dequantize(dots[2 * t][v], dots[2 * t + 1][v],
                                            activations.sum(first + t, 0, group),
                                            activations.sum(first + t, 1, group));
            }
        };
        if constexpr (TOKENS < 3) {
            // The hardware prefetcher expects ascending addresses, so read the header first.
            const Dequantizer<FORMAT, SCALE> headers[] = {header(0), header(1), header(2),
                                                          header(3)};
            asm volatile("" ::: "memory");
            multiply_group([&](int v) { return headers[v]; });
        } else {  // the sums need the registers
            multiply_group(header);
        }
    }
    for (int t = 0; t < TOKENS; ++t)
        for (int v = 0; v < kVectors; ++v) acc[t][v] *= activations.scale(first + t);
    store_panel<TOKENS>(acc, p.bias, p.dst + first * p.layout.num_rows, panel, layout.num_rows);
}

template <NumberFormat FORMAT, ScaleType SCALE>
void multiply_panel(const Gemm& p, QuantizedActivations& activations, std::int64_t panel) {
    constexpr void (*kMultiply[])(const Gemm&, QuantizedActivations&, std::int64_t,
                                  std::int64_t) = {
        nullptr,
        multiply<FORMAT, SCALE, 1>,
#if defined(__AVX512BF16__)
        multiply<FORMAT, SCALE, 2>,
        multiply<FORMAT, SCALE, 3>,
#endif
    };
    for (std::int64_t first = p.first; first < p.end;) {
        const int count = next_run(p.end - first, kMaxTokens);
        kMultiply[count](p, activations, panel, first);
        first += count;
    }
}

}  // namespace baton::quantized
