// Non-temporal stores of large outputs: these are evicted from the caches before they are read, and
// normal stores would load each cache line before they write it.
#pragma once

#include "gemm.h"
#include "panels.h"

namespace baton {

#if defined(__AVX512BF16__)

inline bool uses_streaming_stores(const GroupedLinear& args) {
    constexpr std::int64_t kBytes = 1 << 20;
    const std::int64_t num_rows = args.matrices[0].num_rows;
    const bool has_whole_lines = num_rows % kPanelRows == 0 && std::uintptr_t(args.dst) % 64 == 0;
    return has_whole_lines && args.num_rows() * num_rows * std::int64_t(sizeof(Bf16)) >= kBytes;
}

// Rounds and stores 32 numbers.
inline void stream(Bf16* target, F32x16 low, F32x16 high) {
    const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), both);
}

inline void streaming_fence() { _mm_sfence(); }  // makes the stores visible to other threads

#else

inline bool uses_streaming_stores(const GroupedLinear&) { return false; }
inline void stream(Bf16*, F32x16, F32x16) {}
inline void streaming_fence() {}

#endif

}  // namespace baton
