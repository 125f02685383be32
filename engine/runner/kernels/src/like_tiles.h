// Vector code with the same bits as AMX tiles. For each sixteen pairs, a tile sums the products of
// the first numbers and those of the second numbers separately, and then adds both to the sum.
//
// Vectors read memory a little faster than tiles, and they need no packing.
#pragma once

#include "panels.h"

#if defined(__AMX_BF16__)

namespace baton {

// Scope in which vector instructions flush denormals to zero, as tiles always do.
class FlushDenormals {
  public:
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    FlushDenormals(const FlushDenormals&) = delete;
    ~FlushDenormals() { _mm_setcsr(before_); }

  private:
    unsigned before_;
};

// bf16 numbers in the low and in the high halves of words.
inline Floats low_of(Words both) { return (Floats)(both << 16); }
inline Floats high_of(Words both) { return (Floats)(both & 0xffff0000u); }

// total += number * numbers (fused multiply-add).
inline void add_product(Floats& total, float number, Floats numbers) {
    total = (Floats)_mm512_fmadd_ps(_mm512_set1_ps(number), (__m512)numbers, (__m512)total);
}

// totals += row * panel. Pairs beyond the last multiple of kPairsAtOnce are left to the caller.
inline void add_row_like_tiles(Floats (&totals)[kVectors], const Bf16* row, const Words* panel,
                               std::int64_t pairs) {
    const FlushDenormals flush_denormals;
    for (std::int64_t pair = 0; pair + kPairsAtOnce <= pairs; pair += kPairsAtOnce) {
        Words both;
        std::memcpy(&both, row + 2 * pair, sizeof both);
        const Floats firsts = low_of(both), seconds = high_of(both);
        for (Floats& total : totals) {
            Floats first{}, second{};
            for (int i = 0; i < kPairsAtOnce; ++i, ++panel) {
                fetch_ahead(panel, 1);
                add_product(first, firsts[i], low_of(*panel));
                add_product(second, seconds[i], high_of(*panel));
            }
            total += first + second;
        }
    }
}

}  // namespace baton

#endif
