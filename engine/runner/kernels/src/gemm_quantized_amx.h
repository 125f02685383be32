// GEMM with packed weights of 8 bits, in AMX tiles.
//
// Few tokens are multiplied in vectors, which are a little faster then. The results are identical:
// sums within a group are exact integers.
#pragma once

#include "gemm_quantized_vectors.h"

namespace baton::quantized {

constexpr int kTileTokens = kTileRows / 2;  // each token has two rows of bytes
constexpr int kRunTokens = 2 * kTileTokens;

// Quads of columns per tile: as many as fit and divide a group.
inline int quads_per_tile(std::int64_t quads) {
    int count = 16;
    while (quads % count != 0) --count;
    return count;
}

// Tiles 0 and 1 are sums of the upper rows of bytes, 2 and 3 those of the lower rows. Tiles 4 and 5
// hold these rows, 6 and 7 numbers of a panel.
class ByteTiles : public Tiles {
  public:
    void configure(int upper, int lower, int quads) {
        if (upper == upper_ && lower == lower_) return;
        Shapes shapes;
        for (int tile = 0; tile < 8; ++tile) {
            const bool is_upper = tile == 0 || tile == 1 || tile == 4;
            shapes.row_bytes[tile] = tile == 4 || tile == 5 ? 4 * quads : sizeof(U32x16);
            shapes.rows[tile] = tile >= 6 ? quads : is_upper ? upper : std::max(lower, 1);
        }
        load(shapes);
        upper_ = upper, lower_ = lower;
    }

  private:
    int upper_ = 0, lower_ = 0;
};

// The rows of bytes of up to kRunTokens tokens, in a group of columns.
struct ByteRows {
    const std::int8_t* first;
    std::int64_t stride;
};

using Dots = I32x16[2 * kTileRows][2];

// dots = rows of bytes * half of the group's numbers.
template <bool HAS_LOWER>
inline void multiply_half(Dots& dots, const ByteRows& rows, const U32x16* half, std::int64_t quads,
                          int tile_quads, bool is_in_memory) {
    constexpr std::int64_t kNext = sizeof(U32x16) * kVectors, kNextDots = sizeof dots[0];
    const std::int8_t* const lower = rows.first + kTileRows * rows.stride;
    compiler_barrier();
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (HAS_LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const auto prefetch = [&](const U32x16* tile) {
        for (int i = 0; is_in_memory && i < tile_quads; ++i) prefetch_ahead(tile + i * kVectors, 1);
    };
    for (std::int64_t quad = 0; quad < quads; quad += tile_quads) {
        const U32x16* const part = half + quad * kVectors;
        _tile_loadd(4, rows.first + 4 * quad, rows.stride);
        _tile_loadd(6, part, kNext);
        _tile_loadd(7, part + 1, kNext);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        prefetch(part);
        if constexpr (HAS_LOWER) {
            _tile_loadd(5, lower + 4 * quad, rows.stride);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
        prefetch(part + 1);
    }
    _tile_stored(0, &dots[0][0], kNextDots);
    _tile_stored(1, &dots[0][1], kNextDots);
    if constexpr (HAS_LOWER) {
        _tile_stored(2, &dots[kTileRows][0], kNextDots);
        _tile_stored(3, &dots[kTileRows][1], kNextDots);
    }
    compiler_barrier();
}

template <NumberFormat FORMAT, ScaleType SCALE, bool HAS_LOWER>
void multiply_run(const Gemm& p, QuantizedActivations& activations, ByteTiles& tiles,
                  std::int64_t panel, std::int64_t first, int num_tokens) {
    const QuantizedLayout& layout = p.layout;
    const std::int64_t quads = layout.padded_group() / 4;
    const int upper = std::min(2 * num_tokens, kTileRows), tile_quads = quads_per_tile(quads);
    tiles.configure(upper, 2 * num_tokens - upper, tile_quads);
    F32x16 acc[kRunTokens][kVectors] = {};
    alignas(64) Dots dots[2];
    const auto multiply = [&](std::int64_t step) {
        const std::int64_t group = step / 2, half = step % 2;
        const std::uint8_t* numbers =
            p.packed + layout.group_at(panel, group) + header_bytes_of(FORMAT, SCALE);
        const ByteRows rows{activations.row(first, 0) + group * layout.padded_group(),
                            activations.stride()};
        multiply_half<HAS_LOWER>(dots[half], rows,
                                 reinterpret_cast<const U32x16*>(numbers) + 2 * half, quads,
                                 tile_quads, first == p.first);
    };
    // Tiles of the next step are computed meanwhile.
    const auto add = [&](std::int64_t step) {
        const std::int64_t group = step / 2, half = step % 2;
        for (int v = 0; v < 2; ++v) {
            const Dequantizer<FORMAT, SCALE> dequantize(p.packed + layout.group_at(panel, group),
                                                        int(2 * half + v));
            for (int t = 0; t < num_tokens; ++t)
                acc[t][2 * half + v] += dequantize(dots[half][2 * t][v], dots[half][2 * t + 1][v],
                                                   activations.sum(first + t, 0, group),
                                                   activations.sum(first + t, 1, group));
        }
    };
    const std::int64_t num_steps = 2 * layout.num_groups();
    multiply(0);
    for (std::int64_t step = 1; step < num_steps; ++step) {
        multiply(step);
        add(step - 1);
    }
    add(num_steps - 1);
    for (int t = 0; t < num_tokens; ++t) {
        for (int v = 0; v < kVectors; ++v) acc[t][v] *= activations.scale(first + t);
        store_row(acc[t], p.bias, p.dst + (first + t) * layout.num_rows, panel, layout.num_rows);
    }
}

template <NumberFormat FORMAT, ScaleType SCALE>
void multiply_many(const Gemm& p, QuantizedActivations& activations, std::int64_t panel) {
    if (p.end - p.first <= kMaxTokens) return multiply_panel<FORMAT, SCALE>(p, activations, panel);
    ByteTiles tiles;
    for (std::int64_t first = p.first, count; first < p.end; first += count) {
        count = std::min<std::int64_t>(p.end - first, kRunTokens);
        const auto multiply = count > kTileTokens ? multiply_run<FORMAT, SCALE, true>
                                                  : multiply_run<FORMAT, SCALE, false>;
        multiply(p, activations, tiles, panel, first, int(count));
    }
}

}  // namespace baton::quantized
