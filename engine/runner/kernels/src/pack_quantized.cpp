// Packing of weights of 4, 6 or 8 bits, and their dequantized rows.

#include "gemm.h"
#include "quantization.h"
#include "thread_pool.h"

#include <algorithm>

using namespace baton;

namespace {

// Writes the scale of a row, and its zero point or offset, into the header of a group.
void pack_header(const PackArgs& args, const QuantizedLayout& layout, std::uint8_t* group,
                 std::int64_t within, std::int64_t scale_at) {
    const auto* const scales = static_cast<const std::uint8_t*>(args.scales);
    if (args.matrix.is_mxfp4) {
        std::uint32_t bits;
        std::memcpy(&bits, scales + scale_at * sizeof bits, sizeof bits);
        group[within] = std::uint8_t(bits >> 23);  // a power of two: its exponent
        return;
    }
    const std::int64_t size = layout.zeros_offset() / kPanelRows;
    std::memcpy(group + within * size, scales + scale_at * size, size);
    if (has_offsets(layout.format)) {
        const auto* const offsets = static_cast<const std::uint8_t*>(args.offsets);
        std::memcpy(group + layout.zeros_offset() + within * size, offsets + scale_at * size, size);
    } else if (!is_centred(layout.format)) {
        group[layout.zeros_offset() + within] = args.zeros[scale_at];
    }
}

// Writes the steps of a row's scales and offsets.
void pack_steps(const PackArgs& args, const QuantizedLayout& layout, std::uint8_t* packed,
                std::int64_t row) {
    const std::int64_t count = layout.num_steps(), within = row % kPanelRows;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t group = i * kStepColumns / layout.group_size;
        auto* const at =
            reinterpret_cast<std::uint16_t*>(packed + layout.steps_at(row / kPanelRows, group));
        at[within] = args.scale_steps[row * count + i];
        if (has_offsets(layout.format))
            at[kPanelRows + within] = args.offset_steps[row * count + i];
    }
}

// A scale of a group, or an offset: `steps` are those of the same.
float scale_of(const QuantizedLayout& layout, const std::uint8_t* group, const std::uint16_t* steps,
               std::int64_t within) {
    if (layout.format == NumberFormat::kMxfp4) return mxfp4_scale(group[within]);
    if (layout.scale_type == ScaleType::kSteps)
        return f16_to_f32(steps[within]) * float(std::int8_t(group[within]));
    if (layout.scale_type == ScaleType::kFloat32) {
        float scale;
        std::memcpy(&scale, group + within * sizeof scale, sizeof scale);
        return scale;
    }
    std::uint16_t half;
    std::memcpy(&half, group + within * sizeof half, sizeof half);
    return layout.scale_type == ScaleType::kBfloat16 ? bf16_to_f32(half) : f16_to_f32(half);
}

// Moves the upper two bits of eight numbers of a row to their place in a group.
void pack_upper_bits(const QuantizedLayout& layout, std::uint8_t* group, std::int64_t within,
                     std::int64_t column, std::uint32_t (&words)[2]) {
    std::uint32_t upper = 0;
    std::uint8_t* const at = group + layout.upper_byte_at(within, column);
    if (column % 16 != 0) std::memcpy(&upper, at, sizeof upper);
    for (int i = 0; i < 2; ++i) {
        upper |= (words[i] >> 4 & 0x03030303u) << layout.upper_shift(column + 4 * i);
        words[i] &= 0x0f0f0f0fu;
    }
    std::memcpy(at, &upper, sizeof upper);
}

// Writes `columns` numbers of a row into their group: as words of four or eight numbers, or one by
// one if tiled. Then rows share bytes if a number has 4 bits.
void pack_group(const QuantizedLayout& layout, std::uint8_t* group, std::int64_t within,
                const std::uint8_t* numbers, std::int64_t columns) {
    if (layout.is_tiled()) {
        for (std::int64_t column = 0; column < columns; ++column) {
            std::uint8_t& byte = group[layout.byte_at(within, column)];
            const int shift = layout.shift(within, column);
            byte = shift == 0 ? numbers[column] : byte | numbers[column] << shift;
        }
        return;
    }
    const std::int64_t step = layout.bits == 8 ? 4 : 8;
    for (std::int64_t column = 0; column < columns; column += step) {
        std::uint32_t words[2] = {};
        std::memcpy(words, numbers + column, std::min(step, columns - column));
        if (layout.bits == 6) pack_upper_bits(layout, group, within, column, words);
        words[0] |= words[1] << 4;
        std::memcpy(group + layout.byte_at(within, column), words, sizeof words[0]);
    }
}

// A number of a row, dequantized. `group` points to the number's group, `steps` to its steps.
float dequantize_number(const QuantizedLayout& layout, const std::uint8_t* group,
                        const std::uint16_t* steps, std::int64_t within, std::int64_t column) {
    const int byte = group[layout.byte_at(within, column)] >> layout.shift(within, column);
    const float scale = scale_of(layout, group, steps, within);
    if (layout.format == NumberFormat::kMxfp4)
        return float(kFp4Bytes[byte & 15] - kFp4Zero) * scale;
    int number = layout.bits == 8 ? byte : byte & 15;
    if (layout.bits == 6) {
        const int upper = group[layout.upper_byte_at(within, column)];
        number |= (upper >> layout.upper_shift(column) & 3) << 4;
    }
    const std::uint8_t* const after = group + layout.zeros_offset();
    if (has_offsets(layout.format))
        return float(number) * scale + scale_of(layout, after, steps + kPanelRows, within);
    if (is_centred(layout.format)) return float(number - centre_of(layout.format)) * scale;
    return float(number - after[within]) * scale;
}

}  // namespace

namespace baton::quantized {

std::int64_t packed_bytes(const PackedMatrix& matrix) { return QuantizedLayout(matrix).bytes(); }

void pack(const PackArgs& args) {
    const QuantizedLayout layout(args.matrix);
    const auto* const weights = static_cast<const std::uint8_t*>(args.weights);
    auto* const packed = static_cast<std::uint8_t*>(args.matrix.packed);
    run_parallel(args.num_threads, [&](int i, int count) {
        constexpr std::int64_t kSharedRows = 4;
        const Slice slice((layout.num_rows + kSharedRows - 1) / kSharedRows, i, count);
        const std::int64_t end = std::min(kSharedRows * slice.end, layout.num_rows);
        for (std::int64_t row = kSharedRows * slice.first; row < end; ++row) {
            const std::int64_t panel = row / kPanelRows, within = row % kPanelRows;
            if (layout.step_bytes() > 0) pack_steps(args, layout, packed, row);
            for (std::int64_t group = 0; group < layout.num_groups(); ++group) {
                std::uint8_t* at = packed + layout.group_at(panel, group);
                pack_header(args, layout, at, within, row * layout.num_groups() + group);
                const std::int64_t first = group * layout.group_size;
                pack_group(layout, at, within, weights + row * layout.num_columns + first,
                           std::min(layout.group_size, layout.num_columns - first));
            }
        }
    });
}

void get_rows(const PackedMatrix& matrix, const std::int64_t* row_ids, std::int64_t count,
              Bf16* dst) {
    const QuantizedLayout layout(matrix);
    const auto* const packed = static_cast<const std::uint8_t*>(matrix.packed);
    for (std::int64_t i = 0; i < count; ++i)
        for (std::int64_t column = 0; column < layout.num_columns; ++column) {
            const std::int64_t panel = row_ids[i] / kPanelRows, within = row_ids[i] % kPanelRows;
            const std::int64_t group = column / layout.group_size;
            const auto* const steps =
                reinterpret_cast<const std::uint16_t*>(packed + layout.steps_at(panel, group));
            const float number = dequantize_number(layout, packed + layout.group_at(panel, group),
                                                   steps, within, column % layout.group_size);
            dst[i * layout.num_columns + column] = f32_to_bf16(number);
        }
}

}  // namespace baton::quantized
