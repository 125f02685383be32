// Products with bf16 weights that were packed once.
//
// A panel holds 64 rows of the weights: for each pair of columns, four vectors of sixteen rows'
// pairs. So a thread reads one stream from begin to end, and each product needs no shuffling.
// A row of the answer adds up in the order of the columns, whatever else is in the batch and
// however many threads there are.

#include "lanes.h"
#include "pool.h"

using namespace baton;

namespace {

constexpr int kVectors = 4;
constexpr int kPanelRows = kVectors * kLanes;
constexpr int kAhead = 16;  // vectors: about a kilobyte
#if defined(__AVX512BF16__)
constexpr int kMostTokens = 6;  // 24 of the 32 registers add up
#else
constexpr int kMostTokens = 2;
#endif

struct Product {
    const Bf16* states;  // [tokens, columns]
    const Words* packed;
    const Bf16* bias;  // or null
    Bf16* answer;      // [tokens, rows]
    std::int64_t num_tokens, num_rows, num_columns;
};

template <int TOKENS>
void multiply(const Product& p, std::int64_t panel, std::int64_t first) {
    const std::int64_t pairs = p.num_columns / 2;
    const Words* weights = p.packed + panel * pairs * kVectors;
    const std::uint32_t* states[TOKENS];
    for (int t = 0; t < TOKENS; ++t)
        states[t] = reinterpret_cast<const std::uint32_t*>(p.states + (first + t) * p.num_columns);
    Floats totals[TOKENS][kVectors] = {};
    for (std::int64_t pair = 0; pair < pairs; ++pair, weights += kVectors) {
        for (int v = 0; v < kVectors; ++v) __builtin_prefetch(weights + kAhead + v);
        for (int t = 0; t < TOKENS; ++t) {
            const Words state = Words{} + states[t][pair];
            for (int v = 0; v < kVectors; ++v) add_products(totals[t][v], weights[v], state);
        }
    }
    const std::int64_t row = panel * kPanelRows;
    for (int t = 0; t < TOKENS; ++t)
        for (int v = 0; v < kVectors; ++v) {
            const std::int64_t at = row + v * kLanes;
            const std::int64_t left = p.num_rows - at;
            if (left <= 0) break;
            Bf16 numbers[kLanes], bias[kLanes] = {};
            const int count = left < kLanes ? int(left) : kLanes;
            if (p.bias != nullptr) std::memcpy(bias, p.bias + at, count * sizeof(Bf16));
            store(numbers, totals[t][v] + wide(bias));
            std::memcpy(p.answer + (first + t) * p.num_rows + at, numbers, count * sizeof(Bf16));
        }
}

using Multiply = void (*)(const Product&, std::int64_t, std::int64_t);

constexpr Multiply kMultiply[] = {
    nullptr, multiply<1>, multiply<2>,
#if defined(__AVX512BF16__)
    multiply<3>, multiply<4>, multiply<5>, multiply<6>,
#endif
};

void multiply_panel(const Product& p, std::int64_t panel) {
    for (std::int64_t first = 0; first < p.num_tokens;) {
        // Runs of about equal length, so that none of them is too short to be worth its reading.
        const std::int64_t left = p.num_tokens - first;
        const std::int64_t num_runs = (left + kMostTokens - 1) / kMostTokens;
        const int count = int((left + num_runs - 1) / num_runs);
        kMultiply[count](p, panel, first);
        first += count;
    }
}

std::uint32_t* word_of(std::uint32_t* packed, std::int64_t pairs, std::int64_t row, std::int64_t pair) {
    const std::int64_t panel = row / kPanelRows, within = row % kPanelRows;
    return packed + (panel * pairs + pair) * kPanelRows + within;
}

}  // namespace

extern "C" {

// What `packed` must hold: bytes.
std::int64_t baton_packed_bytes(std::int64_t num_rows, std::int64_t num_columns) {
    const std::int64_t panels = (num_rows + kPanelRows - 1) / kPanelRows;
    return panels * kPanelRows * num_columns * std::int64_t(sizeof(Bf16));
}

// weights: [rows, columns], columns even; `packed` must be zero.
void baton_pack(const Bf16* weights, std::uint32_t* packed, std::int64_t num_rows,
                std::int64_t num_columns, int num_threads) {
    const std::int64_t pairs = num_columns / 2;
    Pool::of_process().run(num_threads, [=](int i, int count) {
        const Share share(num_rows, i, count);
        for (std::int64_t row = share.first; row < share.end; ++row)
            for (std::int64_t pair = 0; pair < pairs; ++pair)
                std::memcpy(word_of(packed, pairs, row, pair),
                            weights + row * num_columns + 2 * pair, sizeof(std::uint32_t));
    });
}

// Some rows as they were before.
void baton_unpack_rows(const std::uint32_t* packed, const std::int64_t* rows, std::int64_t count,
                       Bf16* target, std::int64_t num_columns) {
    const std::int64_t pairs = num_columns / 2;
    auto* words = const_cast<std::uint32_t*>(packed);
    for (std::int64_t i = 0; i < count; ++i)
        for (std::int64_t pair = 0; pair < pairs; ++pair)
            std::memcpy(target + i * num_columns + 2 * pair, word_of(words, pairs, rows[i], pair),
                        sizeof(std::uint32_t));
}

void baton_linear(const Bf16* states, const void* packed, const Bf16* bias, Bf16* answer,
                  std::int64_t num_tokens, std::int64_t num_rows, std::int64_t num_columns,
                  int num_threads) {
    const Product product{states,     static_cast<const Words*>(packed), bias, answer,
                          num_tokens, num_rows,                          num_columns};
    const std::int64_t panels = (num_rows + kPanelRows - 1) / kPanelRows;
    Pool::of_process().run(num_threads, [&](int i, int count) {
        const Share share(panels, i, count);
        for (std::int64_t panel = share.first; panel < share.end; ++panel)
            multiply_panel(product, panel);
    });
}

}  // extern "C"
