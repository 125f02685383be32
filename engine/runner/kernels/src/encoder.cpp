// Layers of encoders and their parts, in float32. Each sum has a fixed order that depends on the
// token's own text only: its bits do not depend on the batch.

#include "gemm_f32.h"

#include <vector>

using namespace baton;
using namespace baton::f32;

namespace {

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
        const bool copies_values = value_dim > args_.head_dim;
        buffer.resize(padded * (args_.head_dim + kTileRows) +
                      (copies_values ? num_tokens_ * value_dim : 0));
        float* const keys = buffer.data();
        float* const scores = keys + padded * args_.head_dim;
        float* const copied = scores + padded * kTileRows;
        pack_keys(keys);
        if (copies_values) copy_values(copied, value_dim);
        const float* const values = copies_values ? copied : qkv_ + 2 * args_.size;
        const std::int64_t value_stride = copies_values ? value_dim : stride_;
        for (std::int64_t row = 0; row < num_tokens_; row += kTileRows) {
            const auto count = std::min<std::int64_t>(kTileRows, num_tokens_ - row);
            score(row, count, keys, scores, padded);
            for (std::int64_t i = 0; i < count; ++i) softmax(scores + i * padded, padded);
            mix(row, count, scores, padded, values, value_stride);
        }
    }

  private:
    // Keys in panels of kLanes tokens. Those of tokens after the text are zero.
    void pack_keys(float* keys) const {
        const std::int64_t dim = args_.head_dim, whole = dim / 8 * 8;
        for (std::int64_t token = 0; token < num_panels(num_tokens_) * kLanes; token += 8) {
            const float* const src = qkv_ + token * stride_ + args_.size;
            float* const dst = keys + token / kLanes * kLanes * dim + token % kLanes;
            const auto count = std::clamp<std::int64_t>(num_tokens_ - token, 0, 8);
            for (std::int64_t at = 0; at < whole; at += 8) {
                U32x8 rows[8] = {};
                for (int i = 0; i < count; ++i)
                    std::memcpy(&rows[i], src + i * stride_ + at, sizeof rows[i]);
                transpose(rows);
                for (int i = 0; i < 8; ++i)
                    std::memcpy(dst + (at + i) * kLanes, &rows[i], sizeof rows[i]);
            }
            for (std::int64_t at = whole; at < dim; ++at)
                for (int i = 0; i < 8; ++i)
                    dst[at * kLanes + i] = i < count ? src[i * stride_ + at] : 0.0f;
        }
    }

    // Values padded with zeros to whole vectors.
    void copy_values(float* values, std::int64_t value_dim) const {
        for (std::int64_t token = 0; token < num_tokens_; ++token) {
            const float* const value = qkv_ + token * stride_ + 2 * args_.size;
            float* const dst = values + token * value_dim;
            std::copy_n(value, args_.head_dim, dst);
            std::fill(dst + args_.head_dim, dst + value_dim, 0.0f);
        }
    }

    void score(std::int64_t row, std::int64_t count, const float* keys, float* scores,
               std::int64_t padded) const {
        const std::int64_t size = kLanes * args_.head_dim;
        for_panels(padded / kLanes, [&](auto panels, std::int64_t panel) {
            F32x16 sums[kTileRows][kTilePanels];
            multiply<panels>(count, qkv_ + row * stride_, stride_,
                             Panels{keys + panel * size, kLanes, size}, args_.head_dim, kNoPrefetch,
                             sums);
            for (std::int64_t i = 0; i < count; ++i)
                for (int more = 0; more < panels; ++more)
                    store_lanes(scores + i * padded + (panel + more) * kLanes,
                                sums[i][more] * args_.scale, kLanes);
        });
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
             const float* values, std::int64_t value_stride) const {
        for_panels(num_panels(args_.head_dim), [&](auto panels, std::int64_t panel) {
            F32x16 sums[kTileRows][kTilePanels];
            multiply<panels>(count, weights, padded,
                             Panels{values + panel * kLanes, value_stride, kLanes}, num_tokens_,
                             kNoPrefetch, sums);
            for (std::int64_t i = 0; i < count; ++i)
                for (int more = 0; more < panels; ++more) {
                    const std::int64_t at = (panel + more) * kLanes;
                    store_lanes(dst_ + (row + i) * args_.size + at, sums[i][more],
                                args_.head_dim - at);
                }
        });
    }

    const TextAttentionArgs& args_;
    const std::int64_t num_tokens_, stride_;
    const float* const qkv_;
    float* const dst_;
};

void attend(const TextAttentionArgs& args) {
    const std::int64_t average = args.first_tokens[args.num_texts] / args.num_texts + 1;
    parallel_for(
        args.num_texts * args.num_heads, average * average * args.head_dim, args.num_threads,
        [&](std::int64_t at, std::int64_t end) {
            std::vector<float> buffer;
            for (; at < end; ++at) {
                const std::int64_t* const firsts = args.first_tokens + at / args.num_heads;
                TextHead(args, firsts[0], firsts[1] - firsts[0], at % args.num_heads).run(buffer);
            }
        });
}

void normalize_row(const LayerNormF32& norm, float* row, std::int64_t size) {
    const auto total = [&](auto of) {
        F32x16 sums{};
        std::int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) sums += of(load_lanes(row + i, kLanes));
        F32x16 last{};
        if (i < size) {
            last = of(load_lanes(row + i, size - i));
            for (std::int64_t lane = size - i; lane < kLanes; ++lane) last[lane] = 0.0f;
        }
        return sum(sums + last);
    };
    const float mean = total([](F32x16 numbers) { return numbers; }) / float(size);
    const float variance = total([=](F32x16 numbers) {
                               const F32x16 rest = numbers - mean;
                               return rest * rest;
                           }) /
                           float(size);
    const float factor = 1.0f / std::sqrt(variance + norm.epsilon);
    for (std::int64_t i = 0; i < size; i += kLanes) {
        const std::int64_t left = size - i;
        F32x16 numbers = (load_lanes(row + i, left) - mean) * factor;
        numbers *= load_lanes(norm.weight + i, left);
        if (norm.bias) numbers += load_lanes(norm.bias + i, left);
        store_lanes(row + i, numbers, left);
    }
}

void normalize(const LayerNormF32& norm, float* rows, std::int64_t num_rows, std::int64_t size,
               std::int32_t num_threads) {
    parallel_for(num_rows, size, num_threads, [&](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row) normalize_row(norm, rows + row * size, size);
    });
}

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
    linear(args->matrix, args->src, args->dst, args->num_tokens, args->num_threads,
           Finish::kNothing);
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

void baton_text_attention(const TextAttentionArgs* args) { attend(*args); }

void baton_encoder_layer(const EncoderLayerArgs* args) {
    const std::int64_t num_tokens = args->first_tokens[args->num_texts], size = args->size;
    const auto multiply = [=](const PackedF32& matrix, const float* src, float* dst,
                              Finish finish) {
        linear(matrix, src, dst, num_tokens, args->num_threads, finish);
    };
    multiply(args->qkv, args->hidden_states, args->qkv_states, Finish::kNothing);
    const std::int64_t head_dim = size / args->num_heads;
    attend({.qkv = args->qkv_states,
            .dst = args->mixed,
            .first_tokens = args->first_tokens,
            .num_texts = args->num_texts,
            .num_heads = args->num_heads,
            .head_dim = head_dim,
            .size = size,
            .scale = float(1.0 / std::sqrt(double(head_dim))),
            .num_threads = args->num_threads});
    multiply(args->output, args->mixed, args->hidden_states, Finish::kAdd);
    normalize(args->attention_norm, args->hidden_states, num_tokens, size, args->num_threads);
    multiply(args->up, args->hidden_states, args->mlp_states,
             args->gelu_is_exact ? Finish::kExactGelu : Finish::kTanhGelu);
    multiply(args->down, args->mlp_states, args->hidden_states, Finish::kAdd);
    normalize(args->mlp_norm, args->hidden_states, num_tokens, size, args->num_threads);
}

}  // extern "C"
