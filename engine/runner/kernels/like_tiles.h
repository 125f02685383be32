// What a tile does, by vectors, bit for bit: of sixteen pairs the products of the first ones add up
// apart from those of the second ones, and then both are added to the sum.
//
// Vectors read memory a little faster than tiles do, and take numbers as they lie.
#pragma once

#include "panels.h"

#if defined(__AMX_BF16__)

namespace baton {

// While it lives, what is below 2^-126 is zero in vectors, as it always is in tiles.
class SmallIsZero {
  public:
    SmallIsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    SmallIsZero(const SmallIsZero&) = delete;
    ~SmallIsZero() { _mm_setcsr(before_); }

  private:
    unsigned before_;
};

// The numbers in the low halves of words, and those in the high ones.
inline Floats low_of(Words both) { return (Floats)(both << 16); }
inline Floats high_of(Words both) { return (Floats)(both & 0xffff0000u); }

// total += number * numbers, rounded once.
inline void add_product(Floats& total, float number, Floats numbers) {
    total = (Floats)_mm512_fmadd_ps(_mm512_set1_ps(number), (__m512)numbers, (__m512)total);
}

// totals += a row times the panel, of as many pairs as are multiplied at once or a multiple of it.
inline void add_row_like_tiles(Floats (&totals)[kVectors], const Bf16* row, const Words* panel,
                               std::int64_t pairs) {
    const SmallIsZero small_is_zero;
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
