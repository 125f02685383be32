// Products of up to kRunRows rows with a panel, added to sums in memory: with AMX tiles where the
// processor has them, else with vectors. Tiles multiply sixteen pairs of columns at once.
//
// A row is summed in the order of the columns, independent of the other rows.
#pragma once

#include "panels.h"

#if defined(__AVX2__) && !defined(__AVX512BF16__)
#include "microkernel_avx2.h"
#else

namespace baton {

#if defined(__AMX_BF16__)

constexpr int kTileRows = 16;
constexpr int kRunRows = 2 * kTileRows;

// Compiler barrier: tile intrinsics do not declare that they access memory.
inline void compiler_barrier() { asm volatile("" ::: "memory"); }

// 16 no-ops before each tile product. When another hardware thread shares the core, back-to-back
// tile loads and products delay each other: with the no-ops, products with many rows take a fifth
// less time there, and the same time on an unshared core. Twice as many are slower. Measured; the
// cause is not documented.
inline void insert_nops() { asm volatile(".rept 16\n\tnop\n\t.endr"); }

// The tiles of a thread: their numbers of rows, and of bytes per row.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() {
        if (is_configured_) _tile_release();  // else each context switch saves the tiles
    }

    // Stores a tile into unused memory, once per interval. A tile store takes 0.3 us long after the
    // previous one, but 0.03 us shortly after it. Measured; the cause is not documented.
    void store_dummy_tile(std::int64_t pair) {
        constexpr std::int64_t kInterval = 8 * kPairsPerTile;
        if (pair % kInterval == kInterval - kPairsPerTile)
            _tile_stored(6, scratch_, sizeof(U32x16));
    }

  protected:
    struct alignas(64) Shapes {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {};
        std::uint8_t rows[16] = {};
    };

    void load(const Shapes& shapes) {
        compiler_barrier();
        _tile_loadconfig(&shapes);
        is_configured_ = true;
    }

  private:
    bool is_configured_ = false;
    alignas(64) U32x16 scratch_[kTileRows];
};

// Tiles 0 to 3 accumulate, 4 and 5 hold rows, 6 and 7 the panel. Tiles 0, 1 and 4 belong to the
// upper rows, 2, 3 and 5 to the lower ones.
class TileConfig : public Tiles {
  public:
    // Configures the tiles. `columns`: of the sums, and words per row of the panel.
    void configure(int upper, int lower, int columns = kLanes) {
        if (upper == upper_ && lower == lower_ && columns == columns_) return;
        Shapes shapes;
        for (int tile = 0; tile < 8; ++tile) {
            const bool is_upper = tile == 0 || tile == 1 || tile == 4;
            shapes.row_bytes[tile] = tile == 4 || tile == 5 ? 64 : columns * sizeof(float);
            shapes.rows[tile] = tile >= 6 ? kTileRows : is_upper ? upper : lower;
        }
        load(shapes);
        upper_ = upper, lower_ = lower, columns_ = columns;
    }

  private:
    int upper_ = 0, lower_ = 0, columns_ = 0;
};

// Adds the pairs beyond the last multiple of kPairsPerTile.
inline void add_tail(float* sums, std::int64_t sum_stride, const Bf16* rows,
                     std::int64_t row_stride, int count, const U32x16* panel, std::int64_t pairs) {
    for (int row = 0; row < count; ++row)
        for (std::int64_t pair = pairs / kPairsPerTile * kPairsPerTile; pair < pairs; ++pair) {
            std::uint32_t both;
            std::memcpy(&both, rows + row * row_stride + 2 * pair, sizeof both);
            auto* acc = reinterpret_cast<F32x16*>(sums + row * sum_stride);
            for (int v = 0; v < kVectors; ++v)
                dot_add_bf16(acc[v], panel[vector_at(pair, v, pairs)], both);
        }
}

// Location of the panel; from memory it is prefetched.
enum class PanelLocation { kMemory, kCache };

template <PanelLocation LOCATION = PanelLocation::kCache>
inline void add_rows(TileConfig& tile_config, float* sums, std::int64_t sum_stride,
                     const Bf16* rows, std::int64_t row_stride, int count, const U32x16* panel,
                     std::int64_t pairs) {
    const std::int64_t sum_bytes = sum_stride * sizeof(float);
    const std::int64_t row_bytes = row_stride * sizeof(Bf16);
    tile_config.configure(count, count);
    compiler_barrier();
    _tile_loadd(0, sums, sum_bytes);
    _tile_loadd(1, sums + kLanes, sum_bytes);
    _tile_loadd(2, sums + 2 * kLanes, sum_bytes);
    _tile_loadd(3, sums + 3 * kLanes, sum_bytes);
    for (std::int64_t pair = 0; pair + kPairsPerTile <= pairs; pair += kPairsPerTile) {
        const U32x16* part = panel + pair * kVectors;
        const auto prefetch = [part](int tile) {
            if (LOCATION == PanelLocation::kMemory)
                prefetch_ahead(part + tile * kTileRows, kTileRows);
        };
        _tile_loadd(4, rows + 2 * pair, row_bytes);
        _tile_loadd(6, part, sizeof(U32x16));
        _tile_dpbf16ps(0, 4, 6);
        prefetch(0);
        _tile_loadd(7, part + kTileRows, sizeof(U32x16));
        _tile_dpbf16ps(1, 4, 7);
        prefetch(1);
        _tile_loadd(6, part + 2 * kTileRows, sizeof(U32x16));
        _tile_dpbf16ps(2, 4, 6);
        prefetch(2);
        _tile_loadd(7, part + 3 * kTileRows, sizeof(U32x16));
        _tile_dpbf16ps(3, 4, 7);
        prefetch(3);
        tile_config.store_dummy_tile(pair);
    }
    _tile_stored(0, sums, sum_bytes);
    _tile_stored(1, sums + kLanes, sum_bytes);
    _tile_stored(2, sums + 2 * kLanes, sum_bytes);
    _tile_stored(3, sums + 3 * kLanes, sum_bytes);
    add_tail(sums, sum_stride, rows, row_stride, count, panel, pairs);
}

// Multiplies more than sixteen rows by half a panel. Four tiles accumulate, and each loaded tile is
// used twice. Each step prefetches twice: more prefetches at a time would delay the loads.
template <Init INIT, typename Fetch>
inline void add_half(TileConfig& tile_config, float* sums, std::int64_t sum_stride,
                     const Bf16* rows, std::int64_t row_stride, int count, const U32x16* half,
                     std::int64_t pairs, Fetch prefetch) {
    const std::int64_t sum_bytes = sum_stride * sizeof(float);
    const std::int64_t row_bytes = row_stride * sizeof(Bf16);
    const Bf16* const lower = rows + kTileRows * row_stride;
    float* const lower_sums = sums + kTileRows * sum_stride;
    tile_config.configure(kTileRows, count - kTileRows);
    compiler_barrier();
    if (INIT == Init::kZero) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, sum_bytes);
        _tile_loadd(1, sums + kLanes, sum_bytes);
        _tile_loadd(2, lower_sums, sum_bytes);
        _tile_loadd(3, lower_sums + kLanes, sum_bytes);
    }
    for (std::int64_t pair = 0; pair + kPairsPerTile <= pairs; pair += kPairsPerTile) {
        const U32x16* part = half + pair * kVectors;
        _tile_loadd(4, rows + 2 * pair, row_bytes);
        _tile_loadd(6, part, sizeof(U32x16));
        insert_nops();
        _tile_dpbf16ps(0, 4, 6);
        prefetch(part);
        _tile_loadd(7, part + kTileRows, sizeof(U32x16));
        insert_nops();
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, lower + 2 * pair, row_bytes);
        insert_nops();
        _tile_dpbf16ps(2, 5, 6);
        prefetch(part + kTileRows);
        insert_nops();
        _tile_dpbf16ps(3, 5, 7);
        tile_config.store_dummy_tile(pair);
    }
    _tile_stored(0, sums, sum_bytes);
    _tile_stored(1, sums + kLanes, sum_bytes);
    _tile_stored(2, lower_sums, sum_bytes);
    _tile_stored(3, lower_sums + kLanes, sum_bytes);
}

template <Init INIT>
inline void multiply_rows(TileConfig& tile_config, float* sums, std::int64_t sum_stride,
                          const Bf16* rows, std::int64_t row_stride, int count, const U32x16* panel,
                          std::int64_t pairs) {
    if (count > kTileRows) {
        const auto prefetch_next = [](const U32x16* tile) {
            const U32x16* const next = tile + kVectors * kPairsPerTile;
            for (int i = 0; i < kTileRows; ++i) __builtin_prefetch(next + i);
        };
        for (int half = 0; half < 2; ++half)
            add_half<INIT>(tile_config, sums + half * 2 * kLanes, sum_stride, rows, row_stride,
                           count, panel + half * 2 * kTileRows, pairs, prefetch_next);
        return add_tail(sums, sum_stride, rows, row_stride, count, panel, pairs);
    }
    for (int row = 0; INIT == Init::kZero && row < count; ++row)
        std::memset(sums + row * sum_stride, 0, kPanelRows * sizeof(float));
    add_rows(tile_config, sums, sum_stride, rows, row_stride, count, panel, pairs);
}

#else

constexpr int kRunRows = kMaxRows;

struct TileConfig {};

template <int ROWS, Init INIT>
void add_rows(float* sums, std::int64_t sum_stride, const Bf16* rows, std::int64_t row_stride,
              const U32x16* panel, std::int64_t pairs) {
    const std::uint32_t* activations[ROWS];
    Accumulators<ROWS> acc = {};
    for (int row = 0; row < ROWS; ++row) {
        activations[row] = reinterpret_cast<const std::uint32_t*>(rows + row * row_stride);
        if (INIT == Init::kLoad) std::memcpy(acc[row], sums + row * sum_stride, sizeof acc[row]);
    }
    add_panel<ROWS>(acc, activations, panel, pairs);
    for (int row = 0; row < ROWS; ++row)
        std::memcpy(sums + row * sum_stride, acc[row], sizeof acc[row]);
}

template <Init INIT>
inline void multiply_rows(TileConfig&, float* sums, std::int64_t sum_stride, const Bf16* rows,
                          std::int64_t row_stride, int count, const U32x16* panel,
                          std::int64_t pairs) {
    constexpr void (*kAdd[])(float*, std::int64_t, const Bf16*, std::int64_t, const U32x16*,
                             std::int64_t) = {
        nullptr,           add_rows<1, INIT>, add_rows<2, INIT>,
#if defined(__AVX512BF16__)
        add_rows<3, INIT>, add_rows<4, INIT>, add_rows<5, INIT>, add_rows<6, INIT>,
#endif
    };
    kAdd[count](sums, sum_stride, rows, row_stride, panel, pairs);
}

#endif

}  // namespace baton

#endif
