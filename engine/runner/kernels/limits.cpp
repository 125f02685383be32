// What the machine can do at best: the limits that the other kernels are held against.

#include "lanes.h"
#include "pool.h"
#include "tiles.h"

using namespace baton;

namespace {

#if defined(__AMX_BF16__)

float multiplied(std::int64_t num_products) {
    constexpr std::int64_t kOfTile = kTileRows * kPairsAtOnce;
    Tiles tiles;
    tiles.have(kTileRows, kTileRows);
    for (std::int64_t i = 0; i < num_products / kOfTile; i += 4) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    return 0;  // tiles are not left out, whatever comes of them
}

#else

float multiplied(std::int64_t num_products) {
    constexpr int kTotals = 12;
    Floats totals[kTotals];
    for (int t = 0; t < kTotals; ++t) totals[t] = fill(float(t));  // else they are one
    const std::uint32_t one = 0x3f803f80u;
    const Words ones = Words{} + one;
    for (std::int64_t i = 0; i < num_products / kTotals; ++i) {
        for (Floats& total : totals) add_products(total, ones, one);
    }
    float own = 0;
    for (const Floats& total : totals) own += sum(total);
    return own;
}

#endif

}  // namespace

extern "C" {

// Reads all of it once; the answer is there so that nothing is left out.
std::uint32_t baton_read_all(const Words* memory, std::int64_t num_vectors, int num_threads) {
    constexpr int kStreams = 4;
    std::atomic<std::uint32_t> found{0};
    Pool::of_process().run(num_threads, [&](int i, int count) {
        const Share share(num_vectors / kStreams, i, count);
        Words seen[kStreams] = {};
        for (std::int64_t at = share.first * kStreams; at < share.end * kStreams; at += kStreams) {
            fetch_ahead(memory + at, kStreams);
            for (int v = 0; v < kStreams; ++v) seen[v] ^= memory[at + v];
        }
        const Words all = seen[0] ^ seen[1] ^ seen[2] ^ seen[3];
        for (int lane = 0; lane < kLanes; ++lane) found ^= all[lane];
    });
    return found;
}

// So many products of pairs per thread, each for sixteen lanes, with everything in registers.
float baton_multiply_only(std::int64_t num_products, int num_threads) {
    std::atomic<float> found{0};
    Pool::of_process().run(num_threads, [&](int, int) { found = multiplied(num_products); });
    return found;
}

}  // extern "C"
