// Sixty-four rows of a matrix, in the order in which a product reads them.
//
// For each pair of columns a panel holds four vectors of sixteen rows' pairs. So a thread reads
// one stream from begin to end, and no product needs shuffling. Where the processor multiplies
// tiles, a vector's next sixteen pairs lie behind each other: they are a tile.
#pragma once

#include "lanes.h"

#include <new>
#include <vector>

namespace baton {

// Numbers from the begin of a cache line on: else each row of a tile lies in two.
template <typename Number>
struct InLines {
    using value_type = Number;
    static constexpr std::align_val_t kLine{64};

    InLines() = default;
    template <typename Other>
    InLines(const InLines<Other>&) {}
    Number* allocate(std::size_t count) {
        return static_cast<Number*>(::operator new(count * sizeof(Number), kLine));
    }
    void deallocate(Number* numbers, std::size_t) { ::operator delete(numbers, kLine); }
    bool operator==(const InLines&) const = default;
};

template <typename Number>
using Lines = std::vector<Number, InLines<Number>>;

constexpr int kVectors = 4;
constexpr int kPanelRows = kVectors * kLanes;
#if defined(__AVX512BF16__)
constexpr int kMostRows = 6;  // of the other side: 24 of the 32 registers add up
#else
constexpr int kMostRows = 2;
#endif

#if defined(__AMX_BF16__)
constexpr int kPairsAtOnce = 16;
#else
constexpr int kPairsAtOnce = 1;
#endif

// Which of a panel's vectors it is.
inline std::int64_t vector_at(std::int64_t pair, std::int64_t v, std::int64_t pairs) {
    const std::int64_t first = pair / kPairsAtOnce * kPairsAtOnce;
    const std::int64_t count = pairs - first < kPairsAtOnce ? pairs - first : kPairsAtOnce;
    return first * kVectors + v * count + pair - first;
}

// Of a stream from memory, what comes a while after these vectors. A processor with tiles gets more
// that way; others fetch best if they are left alone.
inline void fetch_ahead([[maybe_unused]] const Words* at, [[maybe_unused]] int count) {
#if defined(__AMX_BF16__)
    constexpr int kAhead = 128;  // vectors: 8 KiB
    for (int i = 0; i < count; ++i) __builtin_prefetch(at + kAhead + i, 0, 2);
#endif
}

template <int ROWS>
using Totals = Floats[ROWS][kVectors];

// totals += each row, given as pairs of columns, times the panel. For each pair of the panel, so
// many of the four vectors at `ahead` are fetched.
template <int ROWS, int FETCHED = 0>
inline void add_panel(Totals<ROWS>& totals, const std::uint32_t* const (&rows)[ROWS],
                      const Words* panel, std::int64_t pairs, const Words* ahead = nullptr) {
    for (std::int64_t pair = 0; pair < pairs; ++pair, panel += kVectors) {
        for (int v = 0; v < FETCHED; ++v) __builtin_prefetch(ahead + v, 0, 2);
        if constexpr (FETCHED > 0) ahead += kVectors;
        for (int row = 0; row < ROWS; ++row) {
            const std::uint32_t state = rows[row][pair];
            for (int v = 0; v < kVectors; ++v) add_products(totals[row][v], panel[v], state);
        }
    }
}

// Rounds sixteen numbers into the columns of a row of the answer from `at` on, if it has so many.
inline void store_columns(Floats numbers, const Bf16* bias, Bf16* row, std::int64_t at,
                          std::int64_t num_rows) {
    const std::int64_t left = num_rows - at;
    if (left >= kLanes) return store(row + at, bias == nullptr ? numbers : numbers + wide(bias + at));
    Bf16 added[kLanes] = {}, some[kLanes];
    for (int i = 0; bias != nullptr && i < left; ++i) added[i] = bias[at + i];
    store(some, numbers + wide(added));
    for (int i = 0; i < left; ++i) row[at + i] = some[i];
}

// What a panel gave becomes its columns of the answer, whose rows are `num_rows` wide.
inline void store_row(const Floats (&totals)[kVectors], const Bf16* bias, Bf16* row,
                      std::int64_t panel, std::int64_t num_rows) {
    for (int v = 0; v < kVectors; ++v)
        store_columns(totals[v], bias, row, panel * kPanelRows + v * kLanes, num_rows);
}

template <int ROWS>
inline void store_panel(const Totals<ROWS>& totals, const Bf16* bias, Bf16* answer,
                        std::int64_t panel, std::int64_t num_rows) {
    for (int row = 0; row < ROWS; ++row)
        store_row(totals[row], bias, answer + row * num_rows, panel, num_rows);
}

// The length of the next run when so many rows are left: runs are about equally long, so that
// none of them is too short to be worth the reading.
inline int next_run(std::int64_t left, int most = kMostRows) {
    const std::int64_t num_runs = (left + most - 1) / most;
    return int((left + num_runs - 1) / num_runs);
}

}  // namespace baton
