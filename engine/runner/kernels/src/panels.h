// Packed layout of a matrix: panels of 64 rows.
//
// For each pair of columns, a panel holds four vectors with the pairs of sixteen rows each. So a
// thread reads one sequential stream, and products need no shuffles. With AMX, sixteen pairs of one
// vector are contiguous: they form a tile.
#pragma once

#include "lanes.h"

#include <new>
#include <vector>

namespace baton {

// Allocator that aligns to cache lines: unaligned rows of a tile would span two lines each.
template <typename Number>
struct LineAllocator {
    using value_type = Number;
    static constexpr std::align_val_t kLine{64};

    LineAllocator() = default;
    template <typename Other>
    LineAllocator(const LineAllocator<Other>&) {}
    Number* allocate(std::size_t count) {
        return static_cast<Number*>(::operator new(count * sizeof(Number), kLine));
    }
    void deallocate(Number* numbers, std::size_t) { ::operator delete(numbers, kLine); }
    bool operator==(const LineAllocator&) const = default;
};

template <typename Number>
using AlignedVector = std::vector<Number, LineAllocator<Number>>;

constexpr int kVectors = 4;
constexpr int kPanelRows = kVectors * kLanes;
#if defined(__AVX512BF16__)
constexpr int kMaxRows = 6;  // activation rows per product: 24 of 32 registers accumulate
#else
constexpr int kMaxRows = 2;
#endif

#if defined(__AMX_BF16__)
constexpr int kPairsAtOnce = 16;
#else
constexpr int kPairsAtOnce = 1;
#endif

// Index of the vector, in a panel of `pairs` pairs, with the pairs of rows 16 * v and following.
inline std::int64_t vector_at(std::int64_t pair, std::int64_t v, std::int64_t pairs) {
    const std::int64_t first = pair / kPairsAtOnce * kPairsAtOnce;
    const std::int64_t count = pairs - first < kPairsAtOnce ? pairs - first : kPairsAtOnce;
    return first * kVectors + v * count + pair - first;
}

// Prefetches a memory stream a fixed distance ahead. It helps processors with AMX; on others the
// hardware prefetcher does better alone.
inline void fetch_ahead([[maybe_unused]] const Words* at, [[maybe_unused]] int count) {
#if defined(__AMX_BF16__)
    constexpr int kAhead = 128;  // vectors: 8 KiB
    for (int i = 0; i < count; ++i) __builtin_prefetch(at + kAhead + i, 0, 2);
#endif
}

template <int ROWS>
using Totals = Floats[ROWS][kVectors];

// totals += rows * panel; rows are given as pairs of columns. For each pair it prefetches FETCHED
// of the four vectors at `ahead`.
template <int ROWS, int FETCHED = 0>
inline void add_panel(Totals<ROWS>& totals, const std::uint32_t* const (&rows)[ROWS],
                      const Words* panel, std::int64_t pairs, const Words* ahead = nullptr) {
    for (std::int64_t pair = 0; pair < pairs; ++pair, panel += kVectors) {
        for (int v = 0; v < FETCHED; ++v) __builtin_prefetch(ahead + v, 0, 2);
        if constexpr (FETCHED > 0) ahead += kVectors;
        for (int row = 0; row < ROWS; ++row) {
            const std::uint32_t activation = rows[row][pair];
            for (int v = 0; v < kVectors; ++v) add_products(totals[row][v], panel[v], activation);
        }
    }
}

// Rounds and stores sixteen numbers, plus bias, into an output row from column `at` on. Columns
// past the end of the row are dropped.
inline void store_columns(Floats numbers, const Bf16* bias, Bf16* row, std::int64_t at,
                          std::int64_t num_rows) {
    const std::int64_t left = num_rows - at;
    if (left >= kLanes) return store(row + at, bias == nullptr ? numbers : numbers + wide(bias + at));
    Bf16 added[kLanes] = {}, some[kLanes];
    for (int i = 0; bias != nullptr && i < left; ++i) added[i] = bias[at + i];
    store(some, numbers + wide(added));
    for (int i = 0; i < left; ++i) row[at + i] = some[i];
}

// Stores the sums of a panel into its columns of an output row of `num_rows` columns.
inline void store_row(const Floats (&totals)[kVectors], const Bf16* bias, Bf16* row,
                      std::int64_t panel, std::int64_t num_rows) {
    for (int v = 0; v < kVectors; ++v)
        store_columns(totals[v], bias, row, panel * kPanelRows + v * kLanes, num_rows);
}

template <int ROWS>
inline void store_panel(const Totals<ROWS>& totals, const Bf16* bias, Bf16* dst,
                        std::int64_t panel, std::int64_t num_rows) {
    for (int row = 0; row < ROWS; ++row)
        store_row(totals[row], bias, dst + row * num_rows, panel, num_rows);
}

// Length of the next run of rows. Runs have about the same length, because each of them reads the
// whole panel.
inline int next_run(std::int64_t left, int max_rows = kMaxRows) {
    const std::int64_t num_runs = (left + max_rows - 1) / max_rows;
    return int((left + num_runs - 1) / num_runs);
}

}  // namespace baton
