// Products of float32 with a packed matrix. Each sum has the order of the columns: its bits depend
// on neither the other rows nor the number of threads.
#pragma once

#include "simd.h"
#include "thread_pool.h"
#include "vector_math.h"

#include <algorithm>
#include <type_traits>

namespace baton::f32 {

constexpr int kRegs = kLanes / kRegLanes;       // of a row of a panel
constexpr int kTileRows = 12 * kRegLanes / 16;  // so that twelve accumulators hold a panel's tile
// Panels that a tile multiplies at once. With registers of sixteen lanes there are 32 of them, and
// two panels halve the loads of the rows' numbers, which limit the products otherwise.
constexpr int kTilePanels = kRegs == 1 ? 2 : 1;
constexpr std::int64_t kChunkRows =
    16 * kTileRows;  // rows that multiply a panel while it is cached

// Matrices are packed in panels of kLanes rows: [rows / kLanes][columns][kLanes].
inline std::int64_t num_panels(std::int64_t num_rows) { return (num_rows + kLanes - 1) / kLanes; }

// Memory that is fetched into the cache during a product: a line for each panel, after each `every`
// columns.
struct Prefetch {
    const float* next;
    std::int64_t every;
};

constexpr Prefetch kNoPrefetch{nullptr, 0};

// Panels that a tile multiplies, each `stride` numbers after the one before it, with
// `column_stride` numbers from a column to the next.
struct Panels {
    const float* first;
    std::int64_t column_stride, stride;
};

// Products of `num_rows` <= kTileRows rows and PANELS panels: sums[row][panel].
template <int PANELS, int ROWS = kTileRows>
void multiply(std::int64_t num_rows, const float* src, std::int64_t src_stride, Panels panels,
              std::int64_t depth, Prefetch prefetch, F32x16 (&sums)[kTileRows][kTilePanels]) {
    if constexpr (ROWS > 1)
        if (num_rows < ROWS)
            return multiply<PANELS, ROWS - 1>(num_rows, src, src_stride, panels, depth, prefetch,
                                              sums);
    F32Reg tile[ROWS][PANELS * kRegs] = {};
    std::int64_t wait = prefetch.every;
    for (std::int64_t k = 0; k < depth; ++k) {
        F32Reg numbers[PANELS * kRegs];
#pragma GCC unroll 4
        for (int i = 0; i < PANELS * kRegs; ++i)
            numbers[i] = *(const F32Reg*)(panels.first + i / kRegs * panels.stride +
                                          k * panels.column_stride + i % kRegs * kRegLanes);
        if (--wait == 0) {
#pragma GCC unroll 2
            for (int line = 0; line < PANELS; ++line)
                __builtin_prefetch(prefetch.next + line * kLanes, 0, 2);
            prefetch.next += PANELS * kLanes, wait = prefetch.every;
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const float factor = src[row * src_stride + k];
#pragma GCC unroll 4
            for (int i = 0; i < PANELS * kRegs; ++i) tile[row][i] += numbers[i] * factor;
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int i = 0; i < PANELS * kRegs; ++i)
            reg(sums[row][i / kRegs], i % kRegs) = tile[row][i];
}

// Calls each(panels, first) for all of them, with as many at once as a tile multiplies, as a
// constant.
template <typename Each>
void for_panels(std::int64_t count, Each each) {
    std::int64_t panel = 0;
    for (; panel + kTilePanels <= count; panel += kTilePanels)
        each(std::integral_constant<int, kTilePanels>{}, panel);
    for (; panel < count; ++panel) each(std::integral_constant<int, 1>{}, panel);
}

// A copy of a constant size is one instruction, and of another one a call.
inline F32x16 load_lanes(const float* src, std::int64_t count) {
    F32x16 numbers{};
    if (count >= kLanes)
        std::memcpy(&numbers, src, sizeof numbers);
    else
        std::memcpy(&numbers, src, sizeof(float) * count);
    return numbers;
}

inline void store_lanes(float* dst, const F32x16& numbers, std::int64_t count) {
    if (count >= kLanes)
        std::memcpy(dst, &numbers, sizeof numbers);
    else
        std::memcpy(dst, &numbers, sizeof(float) * count);
}

// What becomes of the sums of a product before they are stored.
enum class Finish { kNothing, kExactGelu, kTanhGelu, kAdd };  // kAdd: to what is stored there

inline void store_finished(float* dst, const F32x16& sums, std::int64_t count, Finish finish) {
    switch (finish) {
        case Finish::kNothing:
            return store_lanes(dst, sums, count);
        case Finish::kAdd:
            return store_lanes(dst, sums + load_lanes(dst, count), count);
        default:
            return store_lanes(dst, gelu(sums, finish == Finish::kExactGelu), count);
    }
}

// Product of some rows and PANELS panels.
template <int PANELS>
void linear_panels(const PackedF32& matrix, const float* src, float* dst, std::int64_t panel,
                   std::int64_t first, std::int64_t end, Finish finish) {
    const std::int64_t size = matrix.num_columns * kLanes;
    const float* const weights = matrix.packed + panel * size;
    // The next panels are fetched evenly during these.
    const std::int64_t num_tiles = (end - first + kTileRows - 1) / kTileRows;
    const std::int64_t tile_rows = (end - first + num_tiles - 1) / num_tiles;
    const bool is_last = panel + 2 * PANELS > num_panels(matrix.num_rows);
    Prefetch prefetch{weights + (is_last ? 0 : PANELS * size), num_tiles};
    F32x16 bias[PANELS] = {};
    for (int i = 0; i < PANELS && matrix.bias; ++i) {
        const std::int64_t column = (panel + i) * kLanes;
        bias[i] = load_lanes(matrix.bias + column, matrix.num_rows - column);
    }
    for (std::int64_t token = first; token < end; token += tile_rows) {
        const auto count = std::min(tile_rows, end - token);
        F32x16 sums[kTileRows][kTilePanels];
        multiply<PANELS>(count, src + token * matrix.num_columns, matrix.num_columns,
                         Panels{weights, kLanes, size}, matrix.num_columns, prefetch, sums);
        prefetch.next += matrix.num_columns / num_tiles * PANELS * kLanes;
        for (std::int64_t row = 0; row < count; ++row)
            for (int i = 0; i < PANELS; ++i) {
                const std::int64_t column = (panel + i) * kLanes;
                store_finished(dst + (token + row) * matrix.num_rows + column,
                               sums[row][i] + bias[i], matrix.num_rows - column, finish);
            }
    }
}

// Linear layer: [tokens, columns] → [tokens, rows].
inline void linear(const PackedF32& matrix, const float* src, float* dst, std::int64_t num_tokens,
                   std::int32_t num_threads, Finish finish) {
    const std::int64_t panels = num_panels(matrix.num_rows);
    const std::int64_t groups = (panels + kTilePanels - 1) / kTilePanels;
    const std::int64_t chunks = (num_tokens + kChunkRows - 1) / kChunkRows;
    const std::int64_t rows = std::min(num_tokens, kChunkRows);
    parallel_for(chunks * groups, matrix.num_columns * rows * kTilePanels, num_threads,
                 [&](std::int64_t at, std::int64_t stop) {
                     for (; at < stop; ++at) {
                         const std::int64_t first = at / groups * kChunkRows;
                         const std::int64_t end = std::min(first + kChunkRows, num_tokens);
                         const std::int64_t panel = at % groups * kTilePanels;
                         if (panel + kTilePanels <= panels)
                             linear_panels<kTilePanels>(matrix, src, dst, panel, first, end,
                                                        finish);
                         else
                             linear_panels<1>(matrix, src, dst, panel, first, end, finish);
                     }
                 });
}

}  // namespace baton::f32
