// Layout of packed weights of 4, 6 or 8 bits, and quantization of the activations.
#pragma once

#include "panels.h"

#include <algorithm>
#include <vector>

namespace baton {

constexpr float kMaxActivation = 32512;  // 127 * 256: the rounded high byte fits into int8

// Format of the numbers and of a group's header. Integers have a scale per row, and a zero point or
// an offset; the zero point of centred ones is the middle of their range. MXFP4 has 4-bit floats
// (E2M1) and one byte per row, the exponent of its scale.
enum class NumberFormat {
    kInt8,
    kInt6,
    kInt4,
    kMxfp4,
    kInt8Offsets,
    kInt6Offsets,
    kInt4Offsets,
    kInt6Centred,
    kInt4Centred
};

constexpr bool is_centred(NumberFormat format) { return format >= NumberFormat::kInt6Centred; }
constexpr bool has_offsets(NumberFormat format) {
    return format >= NumberFormat::kInt8Offsets && !is_centred(format);
}

constexpr int bits_of(NumberFormat format) {
    using enum NumberFormat;
    if (format == kInt8 || format == kInt8Offsets) return 8;
    return format == kInt6 || format == kInt6Offsets || format == kInt6Centred ? 6 : 4;
}

// Zero point of centred numbers.
constexpr int centre_of(NumberFormat format) { return 1 << (bits_of(format) - 1); }

constexpr std::int64_t kSegmentColumns = 128;
constexpr std::int64_t kStepColumns = 256;  // columns with a common step of their scales

constexpr std::int64_t scale_bytes_of(NumberFormat format, ScaleType type) {
    if (format == NumberFormat::kMxfp4 || type == ScaleType::kSteps) return 1;
    return type == ScaleType::kFloat32 ? sizeof(float) : sizeof(std::uint16_t);
}

// Place of a group's zero points or offsets, after its scales. A zero point is a byte, an offset
// has the type of a scale.
constexpr std::int64_t zeros_offset_of(NumberFormat format, ScaleType type) {
    return kPanelRows * scale_bytes_of(format, type);
}

constexpr std::int64_t header_bytes_of(NumberFormat format, ScaleType type) {
    const std::int64_t zeros = zeros_offset_of(format, type);
    if (format == NumberFormat::kMxfp4 || is_centred(format)) return zeros;
    return zeros + (has_offsets(format) ? zeros : kPanelRows);
}

// Bytes of the float16 steps of a panel's scales in kStepColumns, and after them, of its offsets.
constexpr std::int64_t step_bytes_of(NumberFormat format, ScaleType type) {
    if (type != ScaleType::kSteps) return 0;
    return kPanelRows * sizeof(std::uint16_t) * (has_offsets(format) ? 2 : 1);
}

// Scale of doubled FP4 values with an E8M0 exponent: 2^(exponent - 127) / 2.
inline float mxfp4_scale(std::uint8_t exponent) {
    const std::uint32_t bits = exponent == 0 ? 0x00400000u : std::uint32_t(exponent) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return scale * 0.5f;
}

// Scales of sixteen rows of a panel. `group` points to those of the panel's first row.
template <ScaleType SCALE>
inline F32x16 load_scales(const std::uint8_t* group, int v) {
    const auto* const halves = reinterpret_cast<const std::uint16_t*>(group) + v * kLanes;
    if constexpr (SCALE == ScaleType::kBfloat16) return bf16_to_f32(halves);
    if constexpr (SCALE == ScaleType::kFloat16) return f16_to_f32(halves);
    F32x16 scales;
    std::memcpy(&scales, group + v * sizeof scales, sizeof scales);
    return scales;
}

inline F32x16 load_mxfp4_scales(const std::uint8_t* group, int v) {
    const U32x16 bits = zero_extend(group + v * kLanes) << 23;
    return lane_max((F32x16)bits, splat(0x1p-127f)) * 0.5f;
}

// Packed layout: by panel of rows, then by group of columns. A group begins with the scales and
// zero points of its rows, so that a thread reads one sequential stream. If scales are bytes, their
// steps precede the first group of kStepColumns columns.
//
// Four columns of a row are contiguous bytes, or eight columns of 4 bits. If tiled, the columns of
// a tile are contiguous; with 4 bits, 32 words hold those of four rows.
//
// With 6 bits, sixteen columns of a panel have three words of each row: the first one has the upper
// two bits of all, the others the lower four bits of eight columns each.
struct QuantizedLayout {
    NumberFormat format;
    ScaleType scale_type;
    std::int64_t bits, num_rows, num_columns, group_size, activation_bits;

    QuantizedLayout() = default;
    explicit QuantizedLayout(const PackedMatrix& matrix)
        : format(format_of(matrix)), scale_type(matrix.scale_type), bits(matrix.bits),
          num_rows(matrix.num_rows), num_columns(matrix.num_columns), group_size(matrix.group_size),
          activation_bits(matrix.activation_bits) {}

    static NumberFormat format_of(const PackedMatrix& matrix) {
        if (matrix.is_mxfp4) return NumberFormat::kMxfp4;
        if (matrix.is_centred)
            return matrix.bits == 6 ? NumberFormat::kInt6Centred : NumberFormat::kInt4Centred;
        if (matrix.bits == 6)
            return matrix.has_offsets ? NumberFormat::kInt6Offsets : NumberFormat::kInt6;
        if (matrix.has_offsets)
            return matrix.bits == 4 ? NumberFormat::kInt4Offsets : NumberFormat::kInt8Offsets;
        return matrix.bits == 4 ? NumberFormat::kInt4 : NumberFormat::kInt8;
    }

    // Whether dequantized weights are multiplied in tiles. Groups are whole tiles then, and, with 8
    // bits, small: sums of integers cost more.
    bool is_tiled() const {
#if defined(__AMX_BF16__)
        if (activation_bits == 8) return false;
        if (bits == 4) return group_size % 32 == 0;
        return bits == 8 && (group_size == 16 || group_size == 32);
#else
        return false;
#endif
    }
    std::int64_t tile_columns() const { return bits == 8 ? group_size : 32; }
    std::int64_t num_groups() const { return (num_columns + group_size - 1) / group_size; }
    std::int64_t padded_group() const { return (group_size + 7) / 8 * 8; }
    std::int64_t padded_columns() const { return num_groups() * padded_group(); }
    // Segments divide groups, for sums that fit into 32 bits.
    std::int64_t segments_per_group() const {
        return (padded_group() + kSegmentColumns - 1) / kSegmentColumns;
    }
    std::int64_t num_segments() const { return num_groups() * segments_per_group(); }
    std::int64_t num_panels() const { return (num_rows + kPanelRows - 1) / kPanelRows; }
    std::int64_t zeros_offset() const { return zeros_offset_of(format, scale_type); }
    std::int64_t header_bytes() const { return header_bytes_of(format, scale_type); }
    std::int64_t group_bytes() const {
        return header_bytes() + padded_group() * kPanelRows * bits / 8;
    }
    std::int64_t step_bytes() const { return step_bytes_of(format, scale_type); }
    std::int64_t num_steps() const { return (num_columns + kStepColumns - 1) / kStepColumns; }
    std::int64_t panel_bytes() const {
        return num_steps() * step_bytes() + num_groups() * group_bytes();
    }
    std::int64_t bytes() const { return num_panels() * panel_bytes(); }

    std::int64_t group_at(std::int64_t panel, std::int64_t group) const {
        const std::int64_t num_steps = group * group_size / kStepColumns + 1;
        return panel * panel_bytes() + num_steps * step_bytes() + group * group_bytes();
    }
    // Offset of the steps of a group's scales, if these are bytes.
    std::int64_t steps_at(std::int64_t panel, std::int64_t group) const {
        const std::int64_t first_column = group * group_size / kStepColumns * kStepColumns;
        return group_at(panel, first_column / group_size) - step_bytes();
    }
    // Offset of a number in its group, of 6 bits that of its lower four; row and column are those
    // in the panel and in the group.
    std::int64_t byte_at(std::int64_t row, std::int64_t column) const {
        if (is_tiled()) {
            const std::int64_t columns = tile_columns();
            const std::int64_t tile_row = column / columns * kPanelRows + row;
            const std::int64_t within = column % columns;
            if (bits == 8) return header_bytes() + tile_row * columns + within;
            return header_bytes() + 2 * (tile_row / 4 * columns + within) + row % 4 / 2;
        }
        std::int64_t word = bits == 8 ? column / 4 : column / 8;
        if (bits == 6) word += column / 16 + 1;
        return header_bytes() + (word * kPanelRows + row) * 4 + column % 4;
    }
    // Of the upper bits of a number of 6 bits.
    std::int64_t upper_byte_at(std::int64_t row, std::int64_t column) const {
        return header_bytes() + (column / 16 * 3 * kPanelRows + row) * 4 + column % 4;
    }
    int upper_shift(std::int64_t column) const { return column % 16 / 4 * 2; }
    int shift(std::int64_t row, std::int64_t column) const {
        if (bits == 8) return 0;
        return is_tiled() ? row % 2 * 4 : column % 8 >= 4 ? 4 : 0;
    }
};

template <NumberFormat FORMAT, typename Choose>
auto choose_by_scale(const QuantizedLayout& layout, Choose choose) {
    if constexpr (FORMAT != NumberFormat::kMxfp4) {
        if (layout.scale_type == ScaleType::kBfloat16)
            return choose.template operator()<FORMAT, ScaleType::kBfloat16>();
        if (layout.scale_type == ScaleType::kFloat16)
            return choose.template operator()<FORMAT, ScaleType::kFloat16>();
    }
    return choose.template operator()<FORMAT, ScaleType::kFloat32>();
}

// Returns choose<FORMAT, SCALE>() for the format of a matrix, which is one of these.
template <NumberFormat FIRST, NumberFormat... OTHERS, typename Choose>
auto choose_among(const QuantizedLayout& layout, Choose choose) {
    if constexpr (sizeof...(OTHERS) > 0)
        if (layout.format != FIRST) return choose_among<OTHERS...>(layout, choose);
    return choose_by_scale<FIRST>(layout, choose);
}

// For kernels whose activations have 16 bits: numbers of 6 bits are stored in 8.
template <typename Choose>
auto choose_by_format(const QuantizedLayout& layout, Choose choose) {
    return choose_among<NumberFormat::kInt4, NumberFormat::kInt4Offsets, NumberFormat::kMxfp4,
                        NumberFormat::kInt8, NumberFormat::kInt8Offsets>(layout, choose);
}

// Quantized activations. Reused from one GEMM to the next, to reuse its buffers.
class QuantizedActivations {
  public:
    void resize(const QuantizedLayout& layout, std::int64_t num_tokens) {
        layout_ = layout;
        stride_ = layout.padded_columns();
        grow(bytes_, 2 * num_tokens * stride_);
        grow(sums_, 2 * num_tokens * layout.num_segments());
        grow(scales_, num_tokens);
    }

    void quantize(std::int64_t token, const Bf16* activations) {
        const float magnitude = max_magnitude(activations);
        // A non-finite activation makes the scale, and so the whole output row, non-finite.
        scales_[token] = magnitude / kMaxActivation;
        const bool is_nonzero = magnitude > 1e-30f && std::isfinite(magnitude);
        const float factor = is_nonzero ? kMaxActivation / magnitude : 0.0f;
        for (std::int64_t at = 0; at < stride_; at += kLanes) {
            const F32x16 numbers = is_nonzero ? load(activations, at) * factor : F32x16{};
            const I32x16 quantized = round_to_int(numbers);
            store_numbers(token, at, quantized);
        }
        add_up(token);
    }

#if defined(__AVX2__) && !defined(__AVX512BF16__)

    // For each quad, a pair of the even columns and one of the odd columns.
    const std::uint32_t* pairs(std::int64_t token) const {
        return reinterpret_cast<const std::uint32_t*>(bytes_.data() + 2 * token * stride_);
    }
    const std::int32_t* segment_sums(std::int64_t token) const {
        return sums_.data() + token * layout_.num_segments();
    }

#else

    // Bytes of a token: the high ones (part 0) or the low ones (part 1).
    std::int8_t* row(std::int64_t token, int part) {
        return bytes_.data() + (2 * token + part) * stride_;
    }
    const std::uint32_t* quads(std::int64_t token, int part) {
        return reinterpret_cast<const std::uint32_t*>(row(token, part));
    }
    std::int32_t& sum(std::int64_t token, int part, std::int64_t group) {
        return sums_[(2 * token + part) * layout_.num_groups() + group];
    }

#endif

    std::int64_t stride() const { return stride_; }  // columns from one row to the next
    float scale(std::int64_t token) const { return scales_[token]; }

  private:
    template <typename Number>
    static void grow(std::vector<Number>& numbers, std::size_t size) {
        if (numbers.size() < size) numbers.resize(size);
    }

    float max_magnitude(const Bf16* activations) const {
        // Without sign bits, bf16 bit patterns are ordered by magnitude, with NaN above infinity.
        Bf16 magnitude = 0;
        for (std::int64_t i = 0; i < layout_.num_columns; ++i)
            magnitude = std::max<Bf16>(magnitude, activations[i] & 0x7fff);
        return bf16_to_f32(magnitude);
    }

    // Loads sixteen activations, padded with zeros.
    F32x16 load(const Bf16* activations, std::int64_t at) const {
        const std::int64_t left = layout_.num_columns - at;
        if (left >= kLanes) return bf16_to_f32(activations + at);
        Bf16 last[kLanes] = {};
        for (std::int64_t i = 0; i < left; ++i) last[i] = activations[at + i];
        return bf16_to_f32(last);
    }

#if defined(__AVX2__) && !defined(__AVX512BF16__)

    void store_numbers(std::int64_t token, std::int64_t at, const I32x16& numbers) {
        const auto* const quads = reinterpret_cast<const __m256i*>(&numbers);
        const __m256i first = _mm256_shuffle_epi32(_mm256_loadu_si256(quads), 0xd8);
        const __m256i second = _mm256_shuffle_epi32(_mm256_loadu_si256(quads + 1), 0xd8);
        const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
        std::memcpy(bytes_.data() + 2 * (token * stride_ + at), &shorts,
                    2 * std::min<std::int64_t>(kLanes, stride_ - at));
    }

    void add_up(std::int64_t token) {
        const auto* numbers = reinterpret_cast<const std::int16_t*>(pairs(token));
        std::int32_t* sum = sums_.data() + token * layout_.num_segments();
        for (std::int64_t group = 0; group < layout_.num_groups(); ++group)
            for (std::int64_t left = layout_.padded_group(), count; left > 0; left -= count) {
                count = std::min(kSegmentColumns, left);
                std::int32_t total = 0;
                for (std::int64_t i = 0; i < count; ++i) total += numbers[i];
                *sum++ = total, numbers += count;
            }
    }

#else

    void store_numbers(std::int64_t token, std::int64_t at, const I32x16& numbers) {
        const I32x16 high = (numbers + 128) >> 8;
        store_bytes(token, 0, at, high);
        store_bytes(token, 1, at, numbers - high * 256);
    }

    void store_bytes(std::int64_t token, int part, std::int64_t at, I32x16 numbers) {
        typedef std::int8_t Narrow __attribute__((vector_size(kLanes)));
        const Narrow bytes = __builtin_convertvector(numbers, Narrow);
        std::memcpy(row(token, part) + at, &bytes, std::min<std::int64_t>(kLanes, stride_ - at));
    }

    void add_up(std::int64_t token) {
        for (int part = 0; part < 2; ++part) sum_groups(token, part);
    }

    void sum_groups(std::int64_t token, int part) {
        const std::int8_t* bytes = row(token, part);
        for (std::int64_t group = 0; group < layout_.num_groups(); ++group) {
            std::int32_t total = 0;
            for (std::int64_t i = 0; i < layout_.padded_group(); ++i)
                total += bytes[group * layout_.padded_group() + i];
            sum(token, part, group) = total;
        }
    }

#endif

    QuantizedLayout layout_;
    std::int64_t stride_;
    std::vector<std::int8_t> bytes_;
    std::vector<std::int32_t> sums_;
    std::vector<float> scales_;
};

}  // namespace baton
