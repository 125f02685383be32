// GEMM with packed weights of 8 bits, in AMX tiles.
#pragma once

#include "gemm_quantized_vectors.h"

namespace baton::quantized {

constexpr int kTileTokens = kTileRows / 2;

// dots = rows of bytes * the group's 8-bit numbers, sixteen quads at a time.
inline void multiply_tiles(TileConfig& tile_config, I32x16 (&dots)[kTileRows][kVectors],
                           const std::int8_t* rows, std::int64_t stride, int num_rows,
                           const U32x16* numbers, std::int64_t quads) {
    constexpr std::int64_t kQuads = 16, kNext = sizeof(U32x16) * kVectors;
    tile_config.configure(num_rows, num_rows);
    compiler_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    std::int64_t quad = 0;
    for (; quad + kQuads <= quads; quad += kQuads) {
        const U32x16* part = numbers + quad * kVectors;
        _tile_loadd(4, rows + 4 * quad, stride);
        _tile_loadd(6, part, kNext);
        _tile_dpbsud(0, 4, 6);
        prefetch_ahead(part, kTileRows);
        _tile_loadd(7, part + 1, kNext);
        _tile_dpbsud(1, 4, 7);
        prefetch_ahead(part + kTileRows, kTileRows);
        _tile_loadd(6, part + 2, kNext);
        _tile_dpbsud(2, 4, 6);
        prefetch_ahead(part + 2 * kTileRows, kTileRows);
        _tile_loadd(7, part + 3, kNext);
        _tile_dpbsud(3, 4, 7);
        prefetch_ahead(part + 3 * kTileRows, kTileRows);
    }
    _tile_stored(0, &dots[0][0], kNext);
    _tile_stored(1, &dots[0][1], kNext);
    _tile_stored(2, &dots[0][2], kNext);
    _tile_stored(3, &dots[0][3], kNext);
    for (int row = 0; quad < quads && row < num_rows; ++row) {
        const std::uint32_t* own[] = {reinterpret_cast<const std::uint32_t*>(rows + row * stride)};
        auto& row_dots = reinterpret_cast<IntSums<1>&>(dots[row]);
        add_group<NumberFormat::kInt8, 1>(row_dots, own, numbers + quad * kVectors, quad, quads);
    }
}

template <ScaleType SCALE>
void multiply_tokens(const Gemm& p, QuantizedActivations& activations, TileConfig& tile_config,
                     std::int64_t panel, std::int64_t first, int num_tokens) {
    const QuantizedLayout& layout = p.layout;
    const std::int64_t quads = layout.padded_group() / 4;
    F32x16 acc[kTileTokens][kVectors] = {};
    for (std::int64_t group = 0; group < layout.num_groups(); ++group) {
        const std::uint8_t* at = p.packed + layout.group_at(panel, group);
        alignas(64) I32x16 dots[kTileRows][kVectors];
        multiply_tiles(
            tile_config, dots, activations.row(first, 0) + group * layout.padded_group(),
            activations.stride(), 2 * num_tokens,
            reinterpret_cast<const U32x16*>(at + header_bytes_of(NumberFormat::kInt8, SCALE)),
            quads);
        for (int v = 0; v < kVectors; ++v) {
            const Dequantizer<NumberFormat::kInt8, SCALE> dequantize(at, v);
            for (int t = 0; t < num_tokens; ++t)
                acc[t][v] += dequantize(dots[2 * t][v], dots[2 * t + 1][v],
                                        activations.sum(first + t, 0, group),
                                        activations.sum(first + t, 1, group));
        }
    }
    for (int t = 0; t < num_tokens; ++t) {
        for (int v = 0; v < kVectors; ++v) acc[t][v] *= activations.scale(first + t);
        store_row(acc[t], p.bias, p.dst + (first + t) * layout.num_rows, panel, layout.num_rows);
    }
}

// With few tokens vectors are a little faster than tiles. The results are identical.
template <ScaleType SCALE>
void multiply_bytes(const Gemm& p, QuantizedActivations& activations, std::int64_t panel) {
    if (p.end - p.first <= kMaxTokens)
        return multiply_panel<NumberFormat::kInt8, SCALE>(p, activations, panel);
    TileConfig tile_config;
    for (std::int64_t first = p.first, count; first < p.end; first += count) {
        count = std::min<std::int64_t>(p.end - first, kTileTokens);
        multiply_tokens<SCALE>(p, activations, tile_config, panel, first, int(count));
    }
}

}  // namespace baton::quantized
