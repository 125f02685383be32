// Measures the machine's memory bandwidth and arithmetic peak, to compare other kernels with.

#include "microkernel.h"
#include "simd.h"
#include "thread_pool.h"

#include <atomic>

using namespace baton;

namespace {

#if defined(__AMX_BF16__)

float multiply_in_registers(std::int64_t num_products) {
    constexpr std::int64_t kProductsPerTile = kTileRows * kPairsPerTile;
    TileConfig tile_config;
    tile_config.configure(kTileRows, kTileRows);
    for (std::int64_t i = 0; i < num_products / kProductsPerTile; i += 4) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    return 0;  // the compiler does not remove tile instructions
}

#else

float multiply_in_registers(std::int64_t num_products) {
    constexpr int kTotals = 12;
    F32x16 acc[kTotals];
    for (int t = 0; t < kTotals; ++t) acc[t] = splat(float(t));  // equal ones would be merged
    const std::uint32_t one = 0x3f803f80u;
    const U32x16 ones = U32x16{} + one;
    for (std::int64_t i = 0; i < num_products / kTotals; ++i) {
        for (F32x16& total : acc) dot_add_bf16(total, ones, one);
    }
    float total_sum = 0;
    for (const F32x16& total : acc) total_sum += sum(total);
    return total_sum;
}

#endif

}  // namespace

extern "C" {

// The result keeps the compiler from removing the reads.
std::uint32_t baton_read_memory(const void* memory, std::int64_t num_vectors,
                                std::int32_t num_threads) {
    constexpr int kRegs = 8;
    const auto* const words = static_cast<const U32Reg*>(memory);
    const std::int64_t num_steps =
        num_vectors * std::int64_t(sizeof(U32x16) / sizeof(U32Reg)) / kRegs;
    std::atomic<std::uint32_t> found{0};
    run_parallel(num_threads, [&](int i, int count) {
        const Slice slice(num_steps, i, count);
        U32Reg first = {}, second = {}, third = {}, fourth = {};
        for (const U32Reg* at = words + slice.first * kRegs; at < words + slice.end * kRegs;
             at += kRegs) {
            if (kRegLanes == kLanes) prefetch_ahead(reinterpret_cast<const U32x16*>(at), kRegs);
            first ^= at[0] ^ at[1], second ^= at[2] ^ at[3];
            third ^= at[4] ^ at[5], fourth ^= at[6] ^ at[7];
        }
        const U32Reg all = first ^ second ^ third ^ fourth;
        for (int lane = 0; lane < kRegLanes; ++lane) found ^= all[lane];
    });
    return found;
}

float baton_multiply_registers(std::int64_t num_products, std::int32_t num_threads) {
    std::atomic<float> found{0};
    run_parallel(num_threads, [&](int, int) { found = multiply_in_registers(num_products); });
    return found;
}

}  // extern "C"
