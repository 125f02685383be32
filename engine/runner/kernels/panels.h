// Sixty-four rows of a matrix, in the order in which a product reads them.
//
// For each pair of columns a panel holds four vectors of sixteen rows' pairs. So a thread reads
// one stream from begin to end, and no product needs shuffling.
#pragma once

#include "lanes.h"

namespace baton {

constexpr int kVectors = 4;
constexpr int kPanelRows = kVectors * kLanes;
#if defined(__AVX512BF16__)
constexpr int kMostRows = 6;  // of the other side: 24 of the 32 registers add up
#else
constexpr int kMostRows = 2;
#endif

template <int ROWS>
using Totals = Floats[ROWS][kVectors];

constexpr int kAhead = 16;  // vectors: about a kilobyte

// totals += each row, given as pairs of columns, times the panel. For each vector of the panel,
// so many of those at `ahead` are fetched.
template <int ROWS, int FETCHED = kVectors>
inline void add_panel(Totals<ROWS>& totals, const std::uint32_t* const (&rows)[ROWS],
                      const Words* panel, std::int64_t pairs, const Words* ahead) {
    for (std::int64_t pair = 0; pair < pairs; ++pair, panel += kVectors, ahead += kVectors) {
        for (int v = 0; v < FETCHED; ++v) __builtin_prefetch(ahead + v, 0, FETCHED == kVectors ? 3 : 2);
        for (int row = 0; row < ROWS; ++row) {
            const Words state = Words{} + rows[row][pair];
            for (int v = 0; v < kVectors; ++v) add_products(totals[row][v], panel[v], state);
        }
    }
}

// Rounds what a panel gave into its columns of the answer, whose rows are `num_rows` wide.
template <int ROWS>
inline void store_panel(const Totals<ROWS>& totals, const Bf16* bias, Bf16* answer,
                        std::int64_t panel, std::int64_t num_rows) {
    for (int row = 0; row < ROWS; ++row)
        for (int v = 0; v < kVectors; ++v) {
            const std::int64_t at = panel * kPanelRows + v * kLanes;
            const std::int64_t left = num_rows - at;
            if (left <= 0) break;
            Bf16 numbers[kLanes], added[kLanes] = {};
            const int count = left < kLanes ? int(left) : kLanes;
            if (bias != nullptr) std::memcpy(added, bias + at, count * sizeof(Bf16));
            store(numbers, totals[row][v] + wide(added));
            std::memcpy(answer + row * num_rows + at, numbers, count * sizeof(Bf16));
        }
}

// The length of the next run when so many rows are left: runs are about equally long, so that
// none of them is too short to be worth the reading.
inline int next_run(std::int64_t left, int most = kMostRows) {
    const std::int64_t num_runs = (left + most - 1) / most;
    return int((left + num_runs - 1) / num_runs);
}

}  // namespace baton
