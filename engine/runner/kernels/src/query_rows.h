// Online softmax of query rows over a context.
#pragma once

#if defined(__AMX_BF16__)
#include "unpacked_slots_amx.h"
#elif defined(__AVX2__) && !defined(__AVX512BF16__)
#include "unpacked_slots_avx2.h"
#else
#include "unpacked_slots.h"
#endif
#include "packed_slots.h"

#include <limits>

namespace baton {

constexpr float kLog2OfE = 1.44269504f;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// The last tokens of a sequence. All keys and values are already in the cache.
struct Chunk {
    KvContext context;
    const Bf16* queries;  // [tokens, heads, head_dim]
    Bf16* dst;            // [tokens, heads, value_dim]
    std::int64_t num_tokens, window, chunk, gqa_group_size;
    const std::int64_t* seen_ends;  // by token, or null
    const float* sinks;             // by head, or null
    // The softmax uses powers of two: 2^(scale * score). With a soft-cap, a score is
    // tanh(tanh_scale * product); without one, tanh_scale is 0.
    float scale, tanh_scale;

    // `first`: index of the first token's first head.
    Chunk(const AttentionArgs& args, std::int64_t sequence, std::int64_t first,
          std::int64_t num_tokens)
        : context{args.kv, args.layer, args.batch.block_tables + sequence * args.batch.table_stride,
                  args.batch.context_lens[sequence]},
          queries(args.queries + first * args.kv.head_dim),
          dst(args.dst + first * args.kv.value_dim), num_tokens(num_tokens),
          window(args.params.window), chunk(args.params.chunk),
          gqa_group_size(args.num_heads / args.kv.num_kv_heads),
          seen_ends(args.params.is_causal || args.batch.seen_ends == nullptr
                        ? nullptr
                        : args.batch.seen_ends + first / args.num_heads),
          sinks(args.params.sinks),
          scale((has_softcap(args) ? args.params.softcap : args.params.scale) * kLog2OfE),
          tanh_scale(has_softcap(args) ? args.params.scale / args.params.softcap : 0.0f) {}

    std::int64_t num_rows() const { return num_tokens * gqa_group_size; }
    std::int64_t position(std::int64_t token) const { return context.length - num_tokens + token; }
    std::int64_t end_slot(std::int64_t token) const {
        return seen_ends == nullptr ? position(token) + 1 : seen_ends[token];
    }
    std::int64_t first_slot(std::int64_t token) const {
        const std::int64_t own = position(token);
        const std::int64_t first = window > 0 ? std::max<std::int64_t>(0, own - window + 1) : 0;
        return chunk > 0 ? std::max(first, own / chunk * chunk) : first;
    }
    // Score of the sink of a query head.
    float sink(std::int64_t head) const {
        return sinks == nullptr ? kMinusInf : sinks[head] * kLog2OfE / scale;
    }
    // Index of a query head.
    std::int64_t at(std::int64_t token, std::int64_t head, std::int64_t shared) const {
        return (token * context.kv.num_kv_heads + head) * gqa_group_size + shared;
    }

  private:
    static bool has_softcap(const AttentionArgs& args) { return args.params.softcap > 0; }
};

// Scores and softmax weights of a few query rows for kScoreTileSlots slots.
struct ScoreTile {
    F32x16 scores[kRunRows][kScoreTilePanels * kVectors];
    alignas(64) Bf16 weights[kRunRows][kScoreTileSlots];
};

// A few query rows of one KV head, with the state of their online softmax.
class QueryRows {
  public:
    QueryRows(const Chunk& chunk, std::int64_t head, std::int64_t first, int count,
              bool is_unpacked)
        : chunk_(chunk), head_(head), count_(count), queries_(count * chunk.context.kv.head_dim),
          sums_(count * sum_stride()) {
        const std::int64_t size = chunk.context.kv.head_dim;
        for (int row = 0; row < count; ++row) {
            const std::int64_t token = (first + row) / chunk.gqa_group_size;
            const std::int64_t shared = (first + row) % chunk.gqa_group_size;
            index_[row] = chunk.at(token, head, shared);
            std::copy_n(chunk.queries + index_[row] * size, size, queries_.data() + row * size);
            first_slot_[row] = chunk.first_slot(token);
            end_slot_[row] = chunk.end_slot(token);
            max_[row] = chunk.sink(head * chunk.gqa_group_size + shared);
            weight_sum_[row] = F32x16{};
            if (max_[row] != kMinusInf) weight_sum_[row][0] = 1.0f;
        }
        if (is_unpacked) UnpackedSlots::pack_queries(queries_, count);
    }

    std::int64_t head() const { return head_; }

    // Returns whether any row attends to any of `count` slots.
    bool overlaps(std::int64_t slot, std::int64_t count = kScoreTileSlots) const {
        return first_slot_[0] < slot + count && slot < end_slot_[count_ - 1];
    }

    void attend(const PackedSlots& packed, std::int64_t slot, ScoreTile& tile,
                TileConfig& tile_config) {
        const Panels seen = panels(slot);
        packed.score(tile_config, &tile.scores[0][0][0], queries_.data(), count_, seen.first,
                     seen.end);
        softmax(slot, tile, packed.scales());
        packed.add_values(tile_config, sums_.data(), sum_stride(), tile.weights[0], count_,
                          seen.first, seen.end);
    }

    // The same in three parts: `score` and `add` for each step of slots, `softmax` once in between.
    void score(const UnpackedSlots& slots, std::int64_t step, ScoreTile& tile,
               TileConfig& tile_config) const {
        slots.score(tile_config, &tile.scores[0][0][0], queries_.data(), count_, head_, step);
    }
    void softmax(std::int64_t slot, ScoreTile& tile, const SlotScales* scales) {
        const Panels seen = panels(slot);
        for (int row = 0; row < count_; ++row) {
            const std::int64_t begin = first_slot_[row] - slot, end = end_slot_[row] - slot;
            if (scales != nullptr) multiply(tile.scores[row], scales->keys, seen);
            if (chunk_.tanh_scale > 0) apply_softcap(tile.scores[row], seen);
            apply_mask(tile.scores[row], seen.first * kPanelRows, seen.end * kPanelRows, begin,
                       end);
            update_max(row, tile.scores[row], seen);
        }
        // A separate loop: rows are independent here, so the processor can overlap them.
        for (int row = 0; row < count_; ++row)
            exponentiate(row, tile.scores[row], tile.weights[row], seen, scales);
    }
    void add(const UnpackedSlots& slots, std::int64_t step, const ScoreTile& tile) {
        slots.add(sums_.data(), sum_stride(), tile.weights[0], count_, head_, step);
    }

    void write_output() const {
        const std::int64_t size = chunk_.context.kv.value_dim;
        for (int row = 0; row < count_; ++row) {
            const float weight = sum(weight_sum_[row]);
            const float* sums = sums_.data() + row * sum_stride();
            Bf16* dst = chunk_.dst + index_[row] * size;
            std::int64_t d = 0;
            for (; d + kLanes <= size; d += kLanes) {
                F32x16 some;
                std::memcpy(&some, sums + d, sizeof some);
                store(dst + d, some / weight);
            }
            for (; d < size; ++d) dst[d] = f32_to_bf16(sums[d] / weight);
        }
    }

  private:
    struct Panels {
        std::int64_t first, end;
    };

    // Panels, of kScoreTileSlots slots, that any row attends to.
    Panels panels(std::int64_t slot) const {
        const std::int64_t seen = std::min(kScoreTileSlots, end_slot_[count_ - 1] - slot);
        return {std::max<std::int64_t>(0, first_slot_[0] - slot) / kPanelRows,
                (seen + kPanelRows - 1) / kPanelRows};
    }

    std::int64_t sum_stride() const {
        return (chunk_.context.kv.value_dim + kPanelRows - 1) / kPanelRows * kPanelRows;
    }

    static void multiply(F32x16* scores, const float* scales, Panels seen) {
        for (std::int64_t v = seen.first * kVectors; v < seen.end * kVectors; ++v)
            scores[v] *= vector_of(scales, v);
    }

    static F32x16 vector_of(const float* scales, std::int64_t v) {
        return reinterpret_cast<const F32x16*>(scales)[v];
    }

    void apply_softcap(F32x16* scores, Panels seen) const {
        for (std::int64_t v = seen.first * kVectors; v < seen.end * kVectors; ++v)
            scores[v] = tanh(scores[v] * chunk_.tanh_scale);
    }

    static void apply_mask(F32x16* scores, std::int64_t from, std::int64_t to, std::int64_t begin,
                           std::int64_t end) {
        auto* seen = reinterpret_cast<float*>(scores);
        for (std::int64_t i = from; i < std::min(begin, to); ++i) seen[i] = kMinusInf;
        for (std::int64_t i = std::max(end, from); i < to; ++i) seen[i] = kMinusInf;
    }

    // Updates the maximum score of a row and rescales its sums.
    void update_max(int row, const F32x16* scores, Panels seen) {
        F32x16 highest[kVectors];
        for (F32x16& each : highest) each = splat(max_[row]);
        for (std::int64_t v = seen.first * kVectors; v < seen.end * kVectors; v += kVectors)
            for (int i = 0; i < kVectors; ++i) highest[i] = lane_max(scores[v + i], highest[i]);
        const F32x16 low = lane_max(highest[0], highest[1]);
        const F32x16 high = lane_max(highest[2], highest[3]);
        const float new_max = reduce_max(lane_max(low, high));
        if (new_max == max_[row]) return;
        if (max_[row] != kMinusInf) rescale(row, std::exp2((max_[row] - new_max) * chunk_.scale));
        max_[row] = new_max;
    }

    // Computes softmax weights relative to the maximum. They are stored times the values' scales.
    void exponentiate(int row, const F32x16* scores, Bf16* rounded_weights, Panels seen,
                      const SlotScales* scales) {
        const float scale = chunk_.scale;
        // If the row has attended to no slot yet, all scores are -inf and all weights are zero.
        const float shift = max_[row] == kMinusInf ? 0.0f : max_[row] * scale;
        F32x16 weight = weight_sum_[row];
        for (std::int64_t v = seen.first * kVectors; v < seen.end * kVectors; v += 2) {
            const F32x16 low = exp2(scores[v], scale, shift);
            const F32x16 high = exp2(scores[v + 1], scale, shift);
            if (scales == nullptr)
                store(rounded_weights + v * kLanes, low, high);
            else
                store(rounded_weights + v * kLanes, low * vector_of(scales->values, v),
                      high * vector_of(scales->values, v + 1));
            weight += low;
            weight += high;
        }
        weight_sum_[row] = weight;
    }

    void rescale(int row, float factor) {
        float* sums = sums_.data() + row * sum_stride();
        for (std::int64_t d = 0; d < sum_stride(); ++d) sums[d] *= factor;
        weight_sum_[row] *= factor;
    }

    const Chunk& chunk_;
    std::int64_t head_;
    int count_;
    AlignedVector<Bf16> queries_;
    AlignedVector<float> sums_;  // [rows, value_dim in whole panels]
    std::int64_t index_[kRunRows], first_slot_[kRunRows], end_slot_[kRunRows];
    float max_[kRunRows];          // initially the score of the sink
    F32x16 weight_sum_[kRunRows];  // sum of weights so far, lane by lane
};

}  // namespace baton
