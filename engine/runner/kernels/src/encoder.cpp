// Products, attention and GELU of encoders, in float32. Each sum has a fixed order that depends on
// the token's own text only: its bits do not depend on the batch.

#include "thread_pool.h"
#include "vector_math.h"

#include <algorithm>
#include <vector>

using namespace baton;

namespace {

constexpr int kRegs = kLanes / kRegLanes;       // of a row of a tile
constexpr int kTileRows = 12 * kRegLanes / 16;  // so that a tile has twelve accumulators
constexpr std::int64_t kChunkRows =
    16 * kTileRows;  // rows that multiply a panel while it is cached

// Columns of a matrix in panels of kLanes rows: [rows / kLanes][columns][kLanes].
std::int64_t num_panels(std::int64_t num_rows) { return (num_rows + kLanes - 1) / kLanes; }

// Memory that is fetched into the cache during a product: a line after each `every` columns.
struct Prefetch {
    const float* next;
    std::int64_t every;
};

constexpr Prefetch kNothing{nullptr, 0};

// Tile of the product of ROWS rows and a panel.
template <int ROWS>
struct Tile {
    F32Reg sums[ROWS][kRegs] = {};

    void add(const float* src, std::int64_t src_stride, const float* panel,
             std::int64_t panel_stride, std::int64_t depth, Prefetch prefetch) {
        std::int64_t wait = prefetch.every;
        for (std::int64_t k = 0; k < depth; ++k) {
            F32Reg numbers[kRegs];
#pragma GCC unroll 4
            for (int i = 0; i < kRegs; ++i)
                numbers[i] = *(const F32Reg*)(panel + k * panel_stride + i * kRegLanes);
            if (--wait == 0) {
                __builtin_prefetch(prefetch.next, 0, 2);
                prefetch.next += kLanes, wait = prefetch.every;
            }
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row) {
                const float factor = src[row * src_stride + k];
#pragma GCC unroll 4
                for (int i = 0; i < kRegs; ++i) sums[row][i] += numbers[i] * factor;
            }
        }
    }

    // Calls each(row, F32x16).
    template <typename Each>
    void finish(Each each) const {
        for (int row = 0; row < ROWS; ++row) {
            F32x16 numbers;
            for_each_reg([&](int i) { reg(numbers, i) = sums[row][i]; });
            each(row, numbers);
        }
    }
};

// Calls each(row, F32x16) with the products of `num_rows` <= kTileRows rows and a panel.
template <int ROWS = kTileRows, typename Each>
void multiply(std::int64_t num_rows, const float* src, std::int64_t src_stride, const float* panel,
              std::int64_t panel_stride, std::int64_t depth, Prefetch prefetch, Each each) {
    if constexpr (ROWS > 1)
        if (num_rows < ROWS)
            return multiply<ROWS - 1>(num_rows, src, src_stride, panel, panel_stride, depth,
                                      prefetch, each);
    Tile<ROWS> tile;
    tile.add(src, src_stride, panel, panel_stride, depth, prefetch);
    tile.finish(each);
}

F32x16 load_lanes(const float* src, std::int64_t count) {
    F32x16 numbers{};
    std::memcpy(&numbers, src, sizeof(float) * std::min<std::int64_t>(count, kLanes));
    return numbers;
}

void store_lanes(float* dst, const F32x16& numbers, std::int64_t count) {
    std::memcpy(dst, &numbers, sizeof(float) * std::min<std::int64_t>(count, kLanes));
}

void linear_panel(const LinearF32Args& args, std::int64_t panel, std::int64_t first,
                  std::int64_t end) {
    const std::int64_t size = args.num_columns * kLanes, column = panel * kLanes;
    const std::int64_t left = args.num_rows - column;
    const float* const weights = args.packed + panel * size;
    // The next panel is fetched evenly during this one.
    const std::int64_t num_tiles = (end - first + kTileRows - 1) / kTileRows;
    Prefetch prefetch{weights + (left > kLanes ? size : 0), num_tiles};
    const F32x16 bias = args.bias ? load_lanes(args.bias + column, left) : F32x16{};
    for (std::int64_t token = first; token < end; token += kTileRows) {
        const float* const src = args.src + token * args.num_columns;
        float* const dst = args.dst + token * args.num_rows + column;
        multiply(std::min<std::int64_t>(kTileRows, end - token), src, args.num_columns, weights,
                 kLanes, args.num_columns, prefetch, [&](int row, F32x16 products) {
                     store_lanes(dst + row * args.num_rows, products + bias, left);
                 });
        prefetch.next += args.num_columns / num_tiles * kLanes;
    }
}

// erf(x), off by 2e-7 at most (Abramowitz and Stegun, 7.1.26). A NaN stays a NaN.
F32x16 erf(F32x16 x) {
    const U32x16 sign = (U32x16)x & 0x80000000u;
    const F32x16 size = (F32x16)((U32x16)x & 0x7fffffffu);
    const F32x16 t = 1.0f / (1.0f + 0.3275911f * size);
    F32x16 power = splat(1.061405429f);
    for (const float factor : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
        power = power * t + factor;
    const F32x16 result = 1.0f - power * t * exp(-size * size);
    return (F32x16)((U32x16)result | sign);
}

F32x16 gelu(F32x16 x, bool is_exact) {
    if (is_exact) return 0.5f * x * (1.0f + erf(x * 0.707106781f));
    return 0.5f * x * (1.0f + tanh(0.797884561f * (x + 0.044715f * x * x * x)));
}

// Attention of a text's tokens to all of them, for one head.
class TextHead {
  public:
    TextHead(const TextAttentionArgs& args, std::int64_t first, std::int64_t num_tokens,
             std::int64_t head)
        : args_(args), num_tokens_(num_tokens), stride_(3 * args.size),
          qkv_(args.qkv + first * stride_ + head * args.head_dim),
          dst_(args.dst + first * args.size + head * args.head_dim) {}

    void run(std::vector<float>& buffer) {
        const std::int64_t padded = num_panels(num_tokens_) * kLanes;
        const std::int64_t value_dim = num_panels(args_.head_dim) * kLanes;
        buffer.resize(padded * (args_.head_dim + kTileRows) + num_tokens_ * value_dim);
        float* const keys = buffer.data();
        float* const scores = keys + padded * args_.head_dim;
        float* const values = scores + padded * kTileRows;
        pack(keys, values, value_dim);
        for (std::int64_t row = 0; row < num_tokens_; row += kTileRows) {
            const auto count = std::min<std::int64_t>(kTileRows, num_tokens_ - row);
            score(row, count, keys, scores, padded);
            for (std::int64_t i = 0; i < count; ++i) softmax(scores + i * padded, padded);
            mix(row, count, scores, padded, values, value_dim);
        }
    }

  private:
    // Keys in panels of kLanes tokens, values padded with zeros to whole vectors.
    void pack(float* keys, float* values, std::int64_t value_dim) const {
        for (std::int64_t token = 0; token < num_panels(num_tokens_) * kLanes; ++token) {
            const float* const key = qkv_ + token * stride_ + args_.size;
            float* const dst = keys + token / kLanes * kLanes * args_.head_dim + token % kLanes;
            for (std::int64_t i = 0; i < args_.head_dim; ++i)
                dst[i * kLanes] = token < num_tokens_ ? key[i] : 0.0f;
        }
        for (std::int64_t token = 0; token < num_tokens_; ++token) {
            const float* const value = qkv_ + token * stride_ + 2 * args_.size;
            float* const dst = values + token * value_dim;
            std::copy_n(value, args_.head_dim, dst);
            std::fill(dst + args_.head_dim, dst + value_dim, 0.0f);
        }
    }

    void score(std::int64_t row, std::int64_t count, const float* keys, float* scores,
               std::int64_t padded) const {
        for (std::int64_t at = 0; at < padded; at += kLanes) {
            const float* const panel = keys + at * args_.head_dim;
            multiply(count, qkv_ + row * stride_, stride_, panel, kLanes, args_.head_dim, kNothing,
                     [&](int i, F32x16 products) {
                         store_lanes(scores + i * padded + at, products * args_.scale, kLanes);
                     });
        }
    }

    // Weights that sum to one; those of places after the text are zero.
    void softmax(float* scores, std::int64_t padded) const {
        std::fill(scores + num_tokens_, scores + padded, scores[0]);
        F32x16 highest = load_lanes(scores, kLanes);
        for (std::int64_t i = kLanes; i < padded; i += kLanes)
            highest = lane_max(load_lanes(scores + i, kLanes), highest);
        const float most = reduce_max(highest);
        std::fill(scores + num_tokens_, scores + padded, most - 200.0f);
        F32x16 total{};
        for (std::int64_t i = 0; i < padded; i += kLanes) {
            const F32x16 powers = exp(load_lanes(scores + i, kLanes) - most);
            total += powers;
            store_lanes(scores + i, powers, kLanes);
        }
        const float factor = 1.0f / sum(total);
        for (std::int64_t i = 0; i < padded; i += kLanes)
            store_lanes(scores + i, load_lanes(scores + i, kLanes) * factor, kLanes);
    }

    void mix(std::int64_t row, std::int64_t count, const float* weights, std::int64_t padded,
             const float* values, std::int64_t value_dim) const {
        for (std::int64_t at = 0; at < value_dim; at += kLanes)
            multiply(count, weights, padded, values + at, value_dim, num_tokens_, kNothing,
                     [&](int i, F32x16 products) {
                         store_lanes(dst_ + (row + i) * args_.size + at, products,
                                     args_.head_dim - at);
                     });
    }

    const TextAttentionArgs& args_;
    const std::int64_t num_tokens_, stride_;
    const float* const qkv_;
    float* const dst_;
};

}  // namespace

extern "C" {

std::int64_t baton_packed_f32_size(std::int64_t num_rows, std::int64_t num_columns) {
    return num_panels(num_rows) * kLanes * num_columns;
}

void baton_pack_f32(const PackF32Args* args) {
    const std::int64_t size = args->num_columns * kLanes;
    parallel_for(num_panels(args->num_rows), size, args->num_threads,
                 [=](std::int64_t panel, std::int64_t end) {
                     for (; panel < end; ++panel)
                         for (std::int64_t k = 0; k < args->num_columns; ++k)
                             for (std::int64_t i = 0; i < kLanes; ++i) {
                                 const std::int64_t row = panel * kLanes + i;
                                 args->packed[panel * size + k * kLanes + i] =
                                     row < args->num_rows
                                         ? args->weights[row * args->num_columns + k]
                                         : 0.0f;
                             }
                 });
}

void baton_linear_f32(const LinearF32Args* args) {
    const std::int64_t panels = num_panels(args->num_rows);
    const std::int64_t chunks = (args->num_tokens + kChunkRows - 1) / kChunkRows;
    const std::int64_t rows = std::min(args->num_tokens, kChunkRows);
    parallel_for(chunks * panels, args->num_columns * rows, args->num_threads,
                 [=](std::int64_t at, std::int64_t end) {
                     for (; at < end; ++at) {
                         const std::int64_t first = at / panels * kChunkRows;
                         linear_panel(*args, at % panels, first,
                                      std::min(first + kChunkRows, args->num_tokens));
                     }
                 });
}

void baton_gelu_f32(const GeluF32Args* args) {
    parallel_for((args->count + kLanes - 1) / kLanes, kLanes, args->num_threads,
                 [=](std::int64_t at, std::int64_t end) {
                     for (; at < end; ++at) {
                         const std::int64_t left = args->count - at * kLanes;
                         const F32x16 x = load_lanes(args->src + at * kLanes, left);
                         store_lanes(args->dst + at * kLanes, gelu(x, args->is_exact), left);
                     }
                 });
}

void baton_text_attention(const TextAttentionArgs* args) {
    const std::int64_t average = args->first_tokens[args->num_texts] / args->num_texts + 1;
    parallel_for(
        args->num_texts * args->num_heads, average * average * args->head_dim, args->num_threads,
        [=](std::int64_t at, std::int64_t end) {
            std::vector<float> buffer;
            for (; at < end; ++at) {
                const std::int64_t* const firsts = args->first_tokens + at / args->num_heads;
                TextHead(*args, firsts[0], firsts[1] - firsts[0], at % args->num_heads).run(buffer);
            }
        });
}

}  // extern "C"
