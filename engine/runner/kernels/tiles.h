// Up to so many rows times a panel, added to sums that lie in memory: by tiles where the processor
// has them, else by vectors. With tiles, sixteen pairs of columns are multiplied at once.
//
// A row adds up in the order of the columns, whichever rows are beside it.
#pragma once

#include "panels.h"

namespace baton {

// Whether there are sums to which is added, or nothing yet.
enum class Sums { kBegin, kGoOn };

#if defined(__AMX_BF16__)

constexpr int kTileRows = 16;
constexpr int kRunRows = 2 * kTileRows;

// The compiler is not told that tiles read memory: what was written before is there.
inline void settle() { asm volatile("" ::: "memory"); }

// Before a product. Where something else shares the core, loads and products of tiles that follow
// each other without a gap get in each other's way: with it, products with many rows take a fifth
// less time there, and as long as before on a core of one's own (measured; nothing tells why).
// Twice as long a gap takes longer.
inline void leave_a_gap() { asm volatile(".rept 16\n\tnop\n\t.endr"); }

// A thread's tiles. 0 to 3 add up, 4 and 5 are of the rows, 6 and 7 of the panel; 0, 1 and 4 have
// the upper rows, 2, 3 and 5 the lower ones.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() {
        if (upper_ != 0) _tile_release();  // else the system saves them at each change of threads
    }

    // So many columns of sums: as many words has a row of the panel.
    void have(int upper, int lower, int columns = kLanes) {
        if (upper == upper_ && lower == lower_ && columns == columns_) return;
        struct alignas(64) {
            std::uint8_t palette = 1, begin = 0, none[14] = {};
            std::uint16_t row_bytes[16] = {};
            std::uint8_t rows[16] = {};
        } form;
        for (int tile = 0; tile < 8; ++tile) {
            const bool is_upper = tile == 0 || tile == 1 || tile == 4;
            form.row_bytes[tile] = tile == 4 || tile == 5 ? 64 : columns * sizeof(float);
            form.rows[tile] = tile >= 6 ? kTileRows : is_upper ? upper : lower;
        }
        settle();
        _tile_loadconfig(&form);
        upper_ = upper, lower_ = lower, columns_ = columns;
    }

    // Long after the last time, storing a tile takes 0.3 us, and a tenth of it after a short while
    // (measured; nothing tells why). So while a sum grows, a tile is stored for nobody.
    void stay_ready(std::int64_t pair) {
        constexpr std::int64_t kOften = 8 * kPairsAtOnce;
        if (pair % kOften == kOften - kPairsAtOnce) _tile_stored(6, scrap_, sizeof(Words));
    }

  private:
    int upper_ = 0, lower_ = 0, columns_ = 0;
    alignas(64) Words scrap_[kTileRows];
};

// What is left when as many pairs as are multiplied at once have been.
inline void add_rest(float* sums, std::int64_t sum_stride, const Bf16* rows,
                     std::int64_t row_stride, int count, const Words* panel, std::int64_t pairs) {
    for (int row = 0; row < count; ++row)
        for (std::int64_t pair = pairs / kPairsAtOnce * kPairsAtOnce; pair < pairs; ++pair) {
            std::uint32_t both;
            std::memcpy(&both, rows + row * row_stride + 2 * pair, sizeof both);
            auto* own = reinterpret_cast<Floats*>(sums + row * sum_stride);
            for (int v = 0; v < kVectors; ++v)
                add_products(own[v], panel[vector_at(pair, v, pairs)], both);
        }
}

// The panel comes from memory, or from a cache.
enum class From { kMemory, kCache };

template <From FROM = From::kCache>
inline void add_rows(Tiles& tiles, float* sums, std::int64_t sum_stride, const Bf16* rows,
                     std::int64_t row_stride, int count, const Words* panel, std::int64_t pairs) {
    const std::int64_t sum_bytes = sum_stride * sizeof(float), row_bytes = row_stride * sizeof(Bf16);
    tiles.have(count, count);
    settle();
    _tile_loadd(0, sums, sum_bytes);
    _tile_loadd(1, sums + kLanes, sum_bytes);
    _tile_loadd(2, sums + 2 * kLanes, sum_bytes);
    _tile_loadd(3, sums + 3 * kLanes, sum_bytes);
    for (std::int64_t pair = 0; pair + kPairsAtOnce <= pairs; pair += kPairsAtOnce) {
        const Words* part = panel + pair * kVectors;
        const auto fetch = [part](int tile) {
            if (FROM == From::kMemory) fetch_ahead(part + tile * kTileRows, kTileRows);
        };
        _tile_loadd(4, rows + 2 * pair, row_bytes);
        _tile_loadd(6, part, sizeof(Words));
        _tile_dpbf16ps(0, 4, 6);
        fetch(0);
        _tile_loadd(7, part + kTileRows, sizeof(Words));
        _tile_dpbf16ps(1, 4, 7);
        fetch(1);
        _tile_loadd(6, part + 2 * kTileRows, sizeof(Words));
        _tile_dpbf16ps(2, 4, 6);
        fetch(2);
        _tile_loadd(7, part + 3 * kTileRows, sizeof(Words));
        _tile_dpbf16ps(3, 4, 7);
        fetch(3);
        tiles.stay_ready(pair);
    }
    _tile_stored(0, sums, sum_bytes);
    _tile_stored(1, sums + kLanes, sum_bytes);
    _tile_stored(2, sums + 2 * kLanes, sum_bytes);
    _tile_stored(3, sums + 3 * kLanes, sum_bytes);
    add_rest(sums, sum_stride, rows, row_stride, count, panel, pairs);
}

// More than sixteen rows times half a panel: four tiles add up, and what is loaded for one of them
// is used by another. Twice in each step something is fetched: more at once would hold up what is
// loaded.
template <Sums SUMS, typename Fetch>
inline void add_half(Tiles& tiles, float* sums, std::int64_t sum_stride, const Bf16* rows,
                     std::int64_t row_stride, int count, const Words* half, std::int64_t pairs,
                     Fetch fetch) {
    const std::int64_t sum_bytes = sum_stride * sizeof(float), row_bytes = row_stride * sizeof(Bf16);
    const Bf16* const lower = rows + kTileRows * row_stride;
    float* const lower_sums = sums + kTileRows * sum_stride;
    tiles.have(kTileRows, count - kTileRows);
    settle();
    if (SUMS == Sums::kBegin) {
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
    for (std::int64_t pair = 0; pair + kPairsAtOnce <= pairs; pair += kPairsAtOnce) {
        const Words* part = half + pair * kVectors;
        _tile_loadd(4, rows + 2 * pair, row_bytes);
        _tile_loadd(6, part, sizeof(Words));
        leave_a_gap();
        _tile_dpbf16ps(0, 4, 6);
        fetch(part);
        _tile_loadd(7, part + kTileRows, sizeof(Words));
        leave_a_gap();
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, lower + 2 * pair, row_bytes);
        leave_a_gap();
        _tile_dpbf16ps(2, 5, 6);
        fetch(part + kTileRows);
        leave_a_gap();
        _tile_dpbf16ps(3, 5, 7);
        tiles.stay_ready(pair);
    }
    _tile_stored(0, sums, sum_bytes);
    _tile_stored(1, sums + kLanes, sum_bytes);
    _tile_stored(2, lower_sums, sum_bytes);
    _tile_stored(3, lower_sums + kLanes, sum_bytes);
}

template <Sums SUMS>
inline void add_run(Tiles& tiles, float* sums, std::int64_t sum_stride, const Bf16* rows,
                    std::int64_t row_stride, int count, const Words* panel, std::int64_t pairs) {
    if (count > kTileRows) {
        const auto fetch_next = [](const Words* tile) {
            const Words* const next = tile + kVectors * kPairsAtOnce;
            for (int i = 0; i < kTileRows; ++i) __builtin_prefetch(next + i);
        };
        for (int half = 0; half < 2; ++half)
            add_half<SUMS>(tiles, sums + half * 2 * kLanes, sum_stride, rows, row_stride, count,
                           panel + half * 2 * kTileRows, pairs, fetch_next);
        return add_rest(sums, sum_stride, rows, row_stride, count, panel, pairs);
    }
    for (int row = 0; SUMS == Sums::kBegin && row < count; ++row)
        std::memset(sums + row * sum_stride, 0, kPanelRows * sizeof(float));
    add_rows(tiles, sums, sum_stride, rows, row_stride, count, panel, pairs);
}

#else

constexpr int kRunRows = kMostRows;

struct Tiles {};

template <int ROWS, Sums SUMS>
void add_so_many_rows(float* sums, std::int64_t sum_stride, const Bf16* rows,
                      std::int64_t row_stride, const Words* panel, std::int64_t pairs) {
    const std::uint32_t* states[ROWS];
    Totals<ROWS> totals = {};
    for (int row = 0; row < ROWS; ++row) {
        states[row] = reinterpret_cast<const std::uint32_t*>(rows + row * row_stride);
        if (SUMS == Sums::kGoOn)
            std::memcpy(totals[row], sums + row * sum_stride, sizeof totals[row]);
    }
    add_panel<ROWS>(totals, states, panel, pairs);
    for (int row = 0; row < ROWS; ++row)
        std::memcpy(sums + row * sum_stride, totals[row], sizeof totals[row]);
}

template <Sums SUMS>
inline void add_run(Tiles&, float* sums, std::int64_t sum_stride, const Bf16* rows,
                    std::int64_t row_stride, int count, const Words* panel, std::int64_t pairs) {
    constexpr void (*kAdd[])(float*, std::int64_t, const Bf16*, std::int64_t, const Words*,
                             std::int64_t) = {
        nullptr, add_so_many_rows<1, SUMS>, add_so_many_rows<2, SUMS>,
#if defined(__AVX512BF16__)
        add_so_many_rows<3, SUMS>, add_so_many_rows<4, SUMS>,
        add_so_many_rows<5, SUMS>, add_so_many_rows<6, SUMS>,
#endif
    };
    kAdd[count](sums, sum_stride, rows, row_stride, panel, pairs);
}

#endif

}  // namespace baton
