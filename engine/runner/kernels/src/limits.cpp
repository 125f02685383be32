// Measures the machine's memory bandwidth and arithmetic peak, to compare other kernels with.

#include "microkernel.h"
#include "simd.h"
#include "thread_pool.h"

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
    constexpr int kStreams = 4;
    const auto* const vectors = static_cast<const U32x16*>(memory);
    std::atomic<std::uint32_t> found{0};
    ThreadPool::instance().run(num_threads, [&](int i, int count) {
        const Slice slice(num_vectors / kStreams, i, count);
        U32x16 seen[kStreams] = {};
        for (std::int64_t at = slice.first * kStreams; at < slice.end * kStreams; at += kStreams) {
            prefetch_ahead(vectors + at, kStreams);
            for (int v = 0; v < kStreams; ++v) seen[v] ^= vectors[at + v];
        }
        const U32x16 all = seen[0] ^ seen[1] ^ seen[2] ^ seen[3];
        for (int lane = 0; lane < kLanes; ++lane) found ^= all[lane];
    });
    return found;
}

float baton_multiply_registers(std::int64_t num_products, std::int32_t num_threads) {
    std::atomic<float> found{0};
    ThreadPool::instance().run(num_threads,
                               [&](int, int) { found = multiply_in_registers(num_products); });
    return found;
}

}  // extern "C"
