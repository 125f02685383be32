// What the machine can do at best: the limits that the other kernels are held against.

#include "lanes.h"
#include "pool.h"

using namespace baton;

extern "C" {

// Reads all of it once; the answer is there so that nothing is left out.
std::uint32_t baton_read_all(const Words* memory, std::int64_t num_vectors, int num_threads) {
    constexpr int kStreams = 4;
    std::atomic<std::uint32_t> found{0};
    Pool::of_process().run(num_threads, [&](int i, int count) {
        const Share share(num_vectors / kStreams, i, count);
        Words seen[kStreams] = {};
        for (std::int64_t at = share.first * kStreams; at < share.end * kStreams; at += kStreams)
            for (int v = 0; v < kStreams; ++v) seen[v] ^= memory[at + v];
        const Words all = seen[0] ^ seen[1] ^ seen[2] ^ seen[3];
        for (int lane = 0; lane < kLanes; ++lane) found ^= all[lane];
    });
    return found;
}

// So many products of pairs per thread, each for sixteen lanes, with everything in registers.
float baton_multiply_only(std::int64_t num_products, int num_threads) {
    constexpr int kTotals = 12;
    std::atomic<float> found{0};
    Pool::of_process().run(num_threads, [&](int, int) {
        Floats totals[kTotals];
        for (int t = 0; t < kTotals; ++t) totals[t] = fill(float(t));  // else they are one
        const Words ones = Words{} + 0x3f803f80u;
        for (std::int64_t i = 0; i < num_products / kTotals; ++i) {
            for (Floats& total : totals) add_products(total, ones, ones);
        }
        float own = 0;
        for (const Floats& total : totals) own += sum(total);
        found = own;
    });
    return found;
}

}  // extern "C"
