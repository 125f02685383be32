// GEMM with packed bf16 weights.
//
// An output row is summed in the order of the columns, for any batch and any number of threads.

#include "amx_emulation.h"
#include "gemm.h"
#include "microkernel.h"
#include "panels.h"
#include "streaming.h"
#include "thread_pool.h"

#include <algorithm>

using namespace baton;

namespace {

struct Gemm {
    const Bf16* activations;  // [tokens, columns]
    const U32x16* packed;
    const Bf16* bias;  // or null
    Bf16* dst;         // [tokens, rows]
    std::int64_t num_tokens, num_rows, num_columns;
    bool is_streamed;

    const U32x16* panel(std::int64_t index) const {
        return packed + index * num_columns / 2 * kVectors;
    }
};

void stream_row(const F32x16 (&acc)[kVectors], const Bf16* bias, Bf16* row, std::int64_t panel) {
    for (std::int64_t v = 0, at = panel * kPanelRows; v < kVectors; v += 2, at += 2 * kLanes) {
        F32x16 low = acc[v], high = acc[v + 1];
        if (bias != nullptr) low += bf16_to_f32(bias + at), high += bf16_to_f32(bias + at + kLanes);
        stream(row + at, low, high);
    }
}

// Stores a panel's columns of a token's output row.
void store_dst(const Gemm& p, const F32x16 (&acc)[kVectors], std::int64_t panel,
               std::int64_t token) {
    Bf16* const dst = p.dst + token * p.num_rows;
    if (p.is_streamed)
        stream_row(acc, p.bias, dst, panel);
    else
        store_row(acc, p.bias, dst, panel, p.num_rows);
}

#if defined(__AMX_BF16__)

using Scratch = TileConfig;
constexpr std::int64_t kRunTokens = 2 * kTileRows;

// Tokens per pass over the weights: as many as fit into L2 together with two panels, split evenly.
// Each pass reads all weights.
std::int64_t tokens_per_pass(std::int64_t num_tokens, std::int64_t num_columns) {
    constexpr std::int64_t kBytes = 1 << 20;
    const std::int64_t run_bytes = kRunTokens * num_columns * sizeof(Bf16);
    const std::int64_t runs = (num_tokens - 1) / kRunTokens + 1;
    const std::int64_t max_runs = std::max<std::int64_t>(1, kBytes / run_bytes);
    const std::int64_t passes = (runs + max_runs - 1) / max_runs;
    return (runs + passes - 1) / passes * kRunTokens;
}

void multiply_panel(const Gemm& p, TileConfig& tile_config, std::int64_t panel, const U32x16* next,
                    std::int64_t first, std::int64_t end) {
    const std::int64_t pairs = p.num_columns / 2;
    const std::int64_t num_runs = (end - first + kRunTokens - 1) / kRunTokens;
    // Each run prefetches its share of the next panel.
    const int fetched = int((kVectors * kPairsPerTile / 4 + num_runs - 1) / num_runs);
    const U32x16 *own_panel = p.panel(panel), *ahead = next;
    const auto prefetch = [&ahead, fetched](const U32x16*) {
        for (int i = 0; i < fetched; ++i) __builtin_prefetch(ahead++, 0, 2);
    };
    for (int count; first < end; first += count) {
        count = int(std::min<std::int64_t>(end - first, kRunTokens));
        alignas(64) F32x16 sums[kRunTokens][kVectors];
        float* const numbers = &sums[0][0][0];
        const Bf16* activations = p.activations + first * p.num_columns;
        if (p.num_tokens == 1) {
            std::fill_n(sums[0], kVectors, F32x16{});
            add_row_emulated(sums[0], activations, own_panel, pairs);
            add_tail(numbers, kPanelRows, activations, p.num_columns, 1, own_panel, pairs);
        } else if (count <= kTileRows) {
            std::memset(numbers, 0, sizeof(F32x16) * kVectors * count);
            add_rows<PanelLocation::kMemory>(tile_config, numbers, kPanelRows, activations,
                                             p.num_columns, count, own_panel, pairs);
        } else {
            for (int half = 0; half < 2; ++half)
                add_half<Init::kZero>(tile_config, numbers + half * 2 * kLanes, kPanelRows,
                                      activations, p.num_columns, count,
                                      own_panel + half * 2 * kTileRows, pairs, prefetch);
            add_tail(numbers, kPanelRows, activations, p.num_columns, count, own_panel, pairs);
        }
        for (int row = 0; row < count; ++row) store_dst(p, sums[row], panel, first + row);
    }
}

#elif defined(__AVX2__) && !defined(__AVX512BF16__)

constexpr std::int64_t kPassTokens = 32 * kRunRows;

// Tokens per pass over the weights: as many as stay in L2 as float32, if they are enough to make up
// for reading the weights.
std::int64_t tokens_per_pass(std::int64_t, std::int64_t num_columns) {
    constexpr std::int64_t kBytes = 1 << 19, kMinTokens = 8 * kRunRows;
    const std::int64_t runs = kBytes / (kRunRows * num_columns * std::int64_t(sizeof(float)));
    return std::clamp(runs * kRunRows, kMinTokens, kPassTokens);
}

// Activations of the tokens of a pass as float32, converted once for all panels, so that products
// only broadcast them: [blocks of columns, tokens, columns of a block].
class Scratch {
  public:
    void load(const Gemm& p, std::int64_t first, std::int64_t end) {
        const Bf16* src = p.activations + first * p.num_columns;
        if (src == src_ && end - first == num_tokens_) return;
        src_ = src, num_tokens_ = end - first;
        thread_local AlignedVector<float> buffer;
        const std::int64_t blocks = (p.num_columns + kStride - 1) / kStride;
        if (const std::size_t size = blocks * num_tokens_ * kStride; buffer.size() < size)
            buffer.resize(size);
        numbers_ = buffer.data();
        for (std::int64_t token = 0; token < num_tokens_; ++token, src += p.num_columns)
            for (std::int64_t block = 0; block < blocks; ++block)
                FloatBlock::load(src + block * kStride, numbers_ + offset(block, token),
                                 std::min(kStride, p.num_columns - block * kStride));
    }
    const float* rows(std::int64_t block, std::int64_t token) const {
        return numbers_ + offset(block, token);
    }

  private:
    static constexpr std::int64_t kStride = FloatBlock::kStride;

    std::int64_t offset(std::int64_t block, std::int64_t token) const {
        return (block * num_tokens_ + token) * kStride;
    }

    const Bf16* src_ = nullptr;
    std::int64_t num_tokens_ = 0;
    float* numbers_ = nullptr;
};

// One token reads the panel as one stream, which the hardware prefetches.
void multiply_token(const Gemm& p, std::int64_t panel, std::int64_t token) {
    const Bf16* const activations = p.activations + token * p.num_columns;
    Accumulators<1> acc = {};
    add_panel<1>(acc, {reinterpret_cast<const std::uint32_t*>(activations)}, p.panel(panel),
                 p.num_columns / 2);
    store_dst(p, acc[0], panel, token);
}

// Multiplies all tokens by a block of the panel, then by the next block. The first run of tokens
// prefetches the next block.
void multiply_panel(const Gemm& p, Scratch& activations, std::int64_t panel, const U32x16* next,
                    std::int64_t first, std::int64_t end) {
    if (end - first == 1) return multiply_token(p, panel, first);
    activations.load(p, first, end);
    const std::int64_t num_pairs = p.num_columns / 2;
    F32x16 sums[kPassTokens][kVectors];
    std::memset(sums, 0, sizeof sums[0] * (end - first));
    for (std::int64_t pair = 0; pair < num_pairs; pair += kBlockPairs) {
        const U32x16* const block = p.panel(panel) + pair * kVectors;
        const bool is_last = pair + kBlockPairs >= num_pairs;
        const U32x16* ahead = is_last ? next : block + kBlockPairs * kVectors;
        for (std::int64_t token = first, count; token < end; token += count, ahead = nullptr) {
            count = next_run(end - token);
            add_block(reinterpret_cast<float*>(sums[token - first]), kPanelRows,
                      activations.rows(pair / kBlockPairs, token - first), int(count), block,
                      std::min<std::int64_t>(kBlockPairs, num_pairs - pair), ahead);
        }
    }
    for (std::int64_t token = first; token < end; ++token)
        store_dst(p, sums[token - first], panel, token);
}

#else

using Scratch = TileConfig;

// Prefetches the cache lines of the output while it is computed.
void prefetch_dst(const Gemm& p, std::int64_t panel, std::int64_t token) {
    const Bf16* const dst = p.dst + token * p.num_rows + panel * kPanelRows;
    __builtin_prefetch(dst, 1, 2);
    __builtin_prefetch(dst + kPanelRows / 2, 1, 2);
}

// Multiplies some tokens by a panel. A single run leaves prefetching to the hardware, which sees
// one stream. Where several runs read the same panel, each prefetches a part of the next one.
template <int TOKENS, int PREFETCHED>
void multiply(const Gemm& p, std::int64_t panel, std::int64_t first, const U32x16* ahead) {
    const std::int64_t pairs = p.num_columns / 2;
    const std::uint32_t* activations[TOKENS];
    for (int t = 0; t < TOKENS; ++t)
        activations[t] =
            reinterpret_cast<const std::uint32_t*>(p.activations + (first + t) * p.num_columns);
    if (PREFETCHED > 0 && !p.is_streamed)
        for (int t = 0; t < TOKENS; ++t) prefetch_dst(p, panel, first + t);
    Accumulators<TOKENS> acc = {};
    add_panel<TOKENS, PREFETCHED>(acc, activations, p.panel(panel), pairs, ahead);
    for (int t = 0; t < TOKENS; ++t) store_dst(p, acc[t], panel, first + t);
}

using MultiplyFn = void (*)(const Gemm&, std::int64_t, std::int64_t, const U32x16*);

template <int PREFETCHED>
constexpr MultiplyFn kMultiply[] = {
    nullptr,
    multiply<1, PREFETCHED>,
    multiply<2, PREFETCHED>,
#if defined(__AVX512BF16__)
    multiply<3, PREFETCHED>,
    multiply<4, PREFETCHED>,
    multiply<5, PREFETCHED>,
    multiply<6, PREFETCHED>,
#endif
};

// Tokens per pass over the weights: as many as stay in cache.
std::int64_t tokens_per_pass(std::int64_t, std::int64_t) { return 32 * kMaxRows; }

void multiply_panel(const Gemm& p, TileConfig&, std::int64_t panel, const U32x16* next,
                    std::int64_t first, std::int64_t end) {
    const std::int64_t num_runs = (end - first + kMaxRows - 1) / kMaxRows;
    for (std::int64_t run = 0; first < end; ++run) {
        const int count = next_run(end - first);
        if (num_runs == 1)
            kMultiply<0>[count](p, panel, first, nullptr);
        else if (num_runs < 4)
            kMultiply<2>[count](p, panel, first, next + (run == 0 ? 0 : 2));
        else
            kMultiply<1>[count](p, panel, first, next + (run < 3 ? run : 3));
        first += count;
    }
}

#endif

// The GEMM of one matrix of the group.
Gemm gemm_of(const GroupedLinear& args, std::int64_t index, bool is_streamed) {
    const PackedMatrix& matrix = args.matrices[index];
    const std::int64_t first = args.row_offsets[index];
    return {
        .activations = args.src + first * matrix.num_columns,
        .packed = static_cast<const U32x16*>(matrix.packed),
        .bias = matrix.bias,
        .dst = args.dst + first * matrix.num_rows,
        .num_tokens = args.row_offsets[index + 1] - first,
        .num_rows = matrix.num_rows,
        .num_columns = matrix.num_columns,
        .is_streamed = is_streamed,
    };
}

std::int64_t num_passes(std::int64_t num_tokens, std::int64_t num_columns) {
    const std::int64_t pass_tokens = tokens_per_pass(num_tokens, num_columns);
    return (num_tokens + pass_tokens - 1) / pass_tokens;
}

std::uint32_t* packed_word(std::uint32_t* packed, std::int64_t pairs, std::int64_t row,
                           std::int64_t pair) {
    const std::int64_t panel = row / kPanelRows, within = row % kPanelRows;
    const std::int64_t vector = vector_at(pair, within / kLanes, pairs);
    return packed + panel * pairs * kPanelRows + vector * kLanes + within % kLanes;
}

}  // namespace

namespace baton::bf16 {

std::int64_t packed_bytes(const PackedMatrix& matrix) {
    const std::int64_t panels = (matrix.num_rows + kPanelRows - 1) / kPanelRows;
    return panels * kPanelRows * matrix.num_columns * std::int64_t(sizeof(Bf16));
}

void pack(const PackArgs& args) {
    const std::int64_t num_rows = args.matrix.num_rows, num_columns = args.matrix.num_columns;
    const std::int64_t pairs = num_columns / 2;
    const auto* const weights = static_cast<const Bf16*>(args.weights);
    auto* const packed = static_cast<std::uint32_t*>(args.matrix.packed);
    run_parallel(args.num_threads, [=](int i, int count) {
        const Slice slice(num_rows, i, count);
        for (std::int64_t row = slice.first; row < slice.end; ++row)
            for (std::int64_t pair = 0; pair < pairs; ++pair)
                std::memcpy(packed_word(packed, pairs, row, pair),
                            weights + row * num_columns + 2 * pair, sizeof(std::uint32_t));
    });
}

void get_rows(const PackedMatrix& matrix, const std::int64_t* row_ids, std::int64_t count,
              Bf16* dst) {
    const std::int64_t pairs = matrix.num_columns / 2;
    auto* const packed = static_cast<std::uint32_t*>(matrix.packed);
    for (std::int64_t i = 0; i < count; ++i)
        for (std::int64_t pair = 0; pair < pairs; ++pair)
            std::memcpy(dst + i * matrix.num_columns + 2 * pair,
                        packed_word(packed, pairs, row_ids[i], pair), sizeof(std::uint32_t));
}

void linear(const GroupedLinear& args) {
    const std::int64_t num_columns = args.matrices[0].num_columns;
    const std::int64_t panels = (args.matrices[0].num_rows + kPanelRows - 1) / kPanelRows;
    std::int64_t max_tokens = 0;
    for (std::int64_t i = 0; i < args.num_matrices; ++i)
        max_tokens = std::max(max_tokens, args.row_offsets[i + 1] - args.row_offsets[i]);
    const bool is_streamed = uses_streaming_stores(args);
    const std::int64_t num_units = args.num_matrices * panels;
    WorkQueue queue(num_units, num_passes(max_tokens, num_columns), args.num_threads);
    run_parallel(args.num_threads, [&](int i, int) {
        Scratch scratch;
        for (WorkQueue::Unit unit; queue.next(i, unit);) {
            const Gemm gemm = gemm_of(args, unit.index / panels, is_streamed);
            const std::int64_t pass_tokens = tokens_per_pass(gemm.num_tokens, num_columns);
            const std::int64_t first = unit.pass * pass_tokens;
            const std::int64_t end = std::min(first + pass_tokens, gemm.num_tokens);
            const std::int64_t next = std::min(unit.index + 1, num_units - 1);
            const Gemm of_next = gemm_of(args, next / panels, is_streamed);
            if (first < end)
                multiply_panel(gemm, scratch, unit.index % panels, of_next.panel(next % panels),
                               first, end);
        }
        if (is_streamed) streaming_fence();
    });
}

}  // namespace baton::bf16
