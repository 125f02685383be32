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
inline F32x16 low_of(U32x16 both) { return (F32x16)(both << 16); }
inline F32x16 high_of(U32x16 both) { return (F32x16)(both & 0xffff0000u); }

// total += number * numbers (fused multiply-add).
inline void multiply_add(F32x16& total, float number, F32x16 numbers) {
    total = (F32x16)_mm512_fmadd_ps(_mm512_set1_ps(number), (__m512)numbers, (__m512)total);
}

// acc += row * panel. Pairs beyond the last multiple of kPairsPerTile are left to the caller.
inline void add_row_emulated(F32x16 (&acc)[kVectors], const Bf16* row, const U32x16* panel,
                             std::int64_t pairs) {
    const FlushDenormals flush_denormals;
    for (std::int64_t pair = 0; pair + kPairsPerTile <= pairs; pair += kPairsPerTile) {
        U32x16 both;
        std::memcpy(&both, row + 2 * pair, sizeof both);
        const F32x16 firsts = low_of(both), seconds = high_of(both);
        for (F32x16& total : acc) {
            F32x16 first{}, second{};
            for (int i = 0; i < kPairsPerTile; ++i, ++panel) {
                prefetch_ahead(panel, 1);
                multiply_add(first, firsts[i], low_of(*panel));
                multiply_add(second, seconds[i], high_of(*panel));
            }
            total += first + second;
        }
    }
}

}  // namespace baton

#endif
