// Packed layout of a matrix: panels of 64 rows.
//
// For each pair of columns, a panel holds four vectors with the pairs of sixteen rows each. So a
// thread reads one sequential stream, and products need no shuffles. With AMX, sixteen pairs of one
// vector are contiguous: they form a tile.
#pragma once

#include "vector_math.h"

#include <new>
#include <vector>

namespace baton {

// Allocator that aligns to cache lines: unaligned rows of a tile would span two lines each.
template <typename Number>
struct CacheLineAllocator {
    using value_type = Number;
    static constexpr std::align_val_t kCacheLine{64};

    CacheLineAllocator() = default;
    template <typename Other>
    CacheLineAllocator(const CacheLineAllocator<Other>&) {}
    Number* allocate(std::size_t count) {
        return static_cast<Number*>(::operator new(count * sizeof(Number), kCacheLine));
    }
    void deallocate(Number* numbers, std::size_t) { ::operator delete(numbers, kCacheLine); }
    bool operator==(const CacheLineAllocator&) const = default;
};

template <typename Number>
using AlignedVector = std::vector<Number, CacheLineAllocator<Number>>;

constexpr int kVectors = 4;
constexpr int kPanelRows = kVectors * kLanes;
#if defined(__AVX512BF16__)
constexpr int kMaxRows = 6;  // activation rows per product: 24 of 32 registers accumulate
#elif defined(__AVX2__)
constexpr int kMaxRows = 6;  // 12 of 16 registers accumulate
#else
constexpr int kMaxRows = 2;
#endif

#if defined(__AMX_BF16__)
constexpr int kPairsPerTile = 16;
#else
constexpr int kPairsPerTile = 1;
#endif

// Index of the vector, in a panel of `pairs` pairs, with the pairs of rows 16 * v and following.
inline std::int64_t vector_at(std::int64_t pair, std::int64_t v, std::int64_t pairs) {
    const std::int64_t first = pair / kPairsPerTile * kPairsPerTile;
    const std::int64_t count = pairs - first < kPairsPerTile ? pairs - first : kPairsPerTile;
    return first * kVectors + v * count + pair - first;
}

// Prefetches a memory stream a fixed distance ahead. It helps processors with AMX; on others the
// hardware prefetcher does better alone.
inline void prefetch_ahead([[maybe_unused]] const U32x16* at, [[maybe_unused]] int count) {
#if defined(__AMX_BF16__)
    constexpr int kAhead = 128;  // vectors: 8 KiB
    for (int i = 0; i < count; ++i) __builtin_prefetch(at + kAhead + i, 0, 2);
#endif
}

// Initial value of the sums: zero, or loaded from memory.
enum class Init { kZero, kLoad };

template <int ROWS>
using Accumulators = F32x16[ROWS][kVectors];

// acc += rows * panel; rows are given as pairs of columns. For each pair it prefetches PREFETCHED
// of the four vectors at `ahead`.
template <int ROWS, int PREFETCHED = 0>
inline void add_panel(Accumulators<ROWS>& acc, const std::uint32_t* const (&rows)[ROWS],
                      const U32x16* panel, std::int64_t pairs, const U32x16* ahead = nullptr) {
    for (std::int64_t pair = 0; pair < pairs; ++pair, panel += kVectors) {
        for (int v = 0; v < PREFETCHED; ++v) __builtin_prefetch(ahead + v, 0, 2);
        if constexpr (PREFETCHED > 0) ahead += kVectors;
        for (int row = 0; row < ROWS; ++row) {
            const std::uint32_t activation = rows[row][pair];
            for (int v = 0; v < kVectors; ++v) dot_add_bf16(acc[row][v], panel[v], activation);
        }
    }
}

// Rounds and stores sixteen numbers, plus bias, into an output row from column `at` on. Columns
// past the end of the row are dropped.
inline void store_columns(F32x16 numbers, const Bf16* bias, Bf16* row, std::int64_t at,
                          std::int64_t num_rows) {
    const std::int64_t left = num_rows - at;
    if (left >= kLanes)
        return store(row + at, bias == nullptr ? numbers : numbers + bf16_to_f32(bias + at));
    Bf16 added[kLanes] = {}, some[kLanes];
    for (int i = 0; bias != nullptr && i < left; ++i) added[i] = bias[at + i];
    store(some, numbers + bf16_to_f32(added));
    for (int i = 0; i < left; ++i) row[at + i] = some[i];
}

// Stores the sums of a panel into its columns of an output row of `num_rows` columns.
inline void store_row(const F32x16 (&acc)[kVectors], const Bf16* bias, Bf16* row,
                      std::int64_t panel, std::int64_t num_rows) {
    for (int v = 0; v < kVectors; ++v)
        store_columns(acc[v], bias, row, panel * kPanelRows + v * kLanes, num_rows);
}

template <int ROWS>
inline void store_panel(const Accumulators<ROWS>& acc, const Bf16* bias, Bf16* dst,
                        std::int64_t panel, std::int64_t num_rows) {
    for (int row = 0; row < ROWS; ++row)
        store_row(acc[row], bias, dst + row * num_rows, panel, num_rows);
}

// Length of the next run of rows. Runs have about the same length, because each of them reads the
// whole panel.
inline int next_run(std::int64_t left, int max_rows = kMaxRows) {
    const std::int64_t num_runs = (left + max_rows - 1) / max_rows;
    return int((left + num_runs - 1) / num_runs);
}

}  // namespace baton
