// Rows of queries on their way over a context.
#pragma once

#if defined(__AMX_BF16__)
#include "in_place_tiles.h"
#else
#include "in_place.h"
#endif
#include "packed_slots.h"

#include <limits>

namespace baton {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// The last tokens of a sequence, whose keys and values are all in their slots.
struct Chunk {
    Context context;
    const Bf16* queries;  // [tokens, heads, head_dim]
    Bf16* answers;        // the same
    std::int64_t num_tokens, window, num_shared;
    float scale;  // of scores that become powers of two

    std::int64_t num_rows() const { return num_tokens * num_shared; }
    std::int64_t position(std::int64_t token) const { return context.length - num_tokens + token; }
    std::int64_t first_slot(std::int64_t token) const {
        return window > 0 ? std::max<std::int64_t>(0, position(token) - window + 1) : 0;
    }
    std::int64_t at(std::int64_t token, std::int64_t head, std::int64_t shared) const {
        return ((token * context.cache.num_kv_heads + head) * num_shared + shared) *
               context.cache.head_dim;
    }
};

// What some rows find in the slots that are taken at once.
struct Look {
    Floats scores[kRunRows][kPanelsAtOnce * kVectors];
    alignas(64) Bf16 weights[kRunRows][kSlotsAtOnce];
};

// A few query rows on their way over the context.
class Rows {
  public:
    Rows(const Chunk& chunk, std::int64_t head, std::int64_t first, int count, bool is_in_place)
        : chunk_(chunk), head_(head), count_(count),
          queries_(count * chunk.context.cache.head_dim), sums_(count * sum_stride()) {
        const std::int64_t size = chunk.context.cache.head_dim;
        for (int row = 0; row < count; ++row) {
            const std::int64_t token = (first + row) / chunk.num_shared;
            at_[row] = chunk.at(token, head, (first + row) % chunk.num_shared);
            std::copy_n(chunk.queries + at_[row], size, queries_.data() + row * size);
            first_slot_[row] = chunk.first_slot(token);
            end_slot_[row] = chunk.position(token) + 1;
            most_[row] = kNever;
            weight_[row] = Floats{};
        }
        if (is_in_place) SlotsInPlace::put_in_order(queries_, count);
    }

    std::int64_t head() const { return head_; }

    // Any of so many slots.
    bool sees(std::int64_t slot, std::int64_t count = kSlotsAtOnce) const {
        return first_slot_[0] < slot + count && slot < end_slot_[count_ - 1];
    }

    void look_at(const PackedSlots& packed, std::int64_t slot, Look& look, Tiles& tiles) {
        const Panels seen = panels(slot);
        packed.score(tiles, &look.scores[0][0][0], queries_.data(), count_, seen.first, seen.end);
        weigh(slot, look);
        packed.add_values(tiles, sums_.data(), sum_stride(), look.weights[0], count_, seen.first,
                          seen.end);
    }

    // The same in three parts; the first and the last are called for each step of the slots.
    void score(const SlotsInPlace& slots, std::int64_t step, Look& look, Tiles& tiles) const {
        slots.score(tiles, &look.scores[0][0][0], queries_.data(), count_, head_, step);
    }
    void weigh(std::int64_t slot, Look& look) {
        const Panels seen = panels(slot);
        for (int row = 0; row < count_; ++row) {
            const std::int64_t begin = first_slot_[row] - slot, end = end_slot_[row] - slot;
            hide(look.scores[row], seen.first * kPanelRows, seen.end * kPanelRows, begin, end);
            relate(row, look.scores[row], seen);
        }
        // On its own, for here nothing depends on what a row finds: the processor takes several.
        for (int row = 0; row < count_; ++row)
            weigh(row, look.scores[row], look.weights[row], seen);
    }
    void add(const SlotsInPlace& slots, std::int64_t step, const Look& look) {
        slots.add(sums_.data(), sum_stride(), look.weights[0], count_, head_, step);
    }

    void answer() const {
        for (int row = 0; row < count_; ++row) {
            const float weight = sum(weight_[row]);
            const float* sums = sums_.data() + row * sum_stride();
            Bf16* answer = chunk_.answers + at_[row];
            std::int64_t d = 0;
            for (; d + kLanes <= chunk_.context.cache.head_dim; d += kLanes) {
                Floats some;
                std::memcpy(&some, sums + d, sizeof some);
                store(answer + d, some / weight);
            }
            for (; d < chunk_.context.cache.head_dim; ++d) answer[d] = narrow(sums[d] / weight);
        }
    }

  private:
    struct Panels {
        std::int64_t first, end;
    };

    // Those that any row sees, of the slots that are taken at once.
    Panels panels(std::int64_t slot) const {
        const std::int64_t seen = std::min(kSlotsAtOnce, end_slot_[count_ - 1] - slot);
        return {std::max<std::int64_t>(0, first_slot_[0] - slot) / kPanelRows,
                (seen + kPanelRows - 1) / kPanelRows};
    }

    std::int64_t sum_stride() const {
        return (chunk_.context.cache.head_dim + kPanelRows - 1) / kPanelRows * kPanelRows;
    }

    static void hide(Floats* scores, std::int64_t from, std::int64_t to, std::int64_t begin,
                     std::int64_t end) {
        auto* seen = reinterpret_cast<float*>(scores);
        for (std::int64_t i = from; i < std::min(begin, to); ++i) seen[i] = kNever;
        for (std::int64_t i = std::max(end, from); i < to; ++i) seen[i] = kNever;
    }

    // The sums become relative to the largest score so far.
    void relate(int row, const Floats* scores, Panels seen) {
        Floats most[kVectors];
        for (Floats& each : most) each = fill(most_[row]);
        for (std::int64_t v = seen.first * kVectors; v < seen.end * kVectors; v += kVectors)
            for (int i = 0; i < kVectors; ++i)
                most[i] = larger(scores[v + i], most[i]);
        const float now = largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
        if (now == most_[row]) return;
        if (most_[row] != kNever) rescale(row, std::exp2((most_[row] - now) * chunk_.scale));
        most_[row] = now;
    }

    // Scores become weights relative to it.
    void weigh(int row, const Floats* scores, Bf16* rounded_weights, Panels seen) {
        const float scale = chunk_.scale;
        // If none of these is seen by this row, all are the largest and none weighs anything.
        const float shift = most_[row] == kNever ? 0.0f : most_[row] * scale;
        Floats weight = weight_[row];
        for (std::int64_t v = seen.first * kVectors; v < seen.end * kVectors; v += 2) {
            const Floats low = power_of_two(scores[v] * scale - shift);
            const Floats high = power_of_two(scores[v + 1] * scale - shift);
            store(rounded_weights + v * kLanes, low, high);
            weight += low;
            weight += high;
        }
        weight_[row] = weight;
    }

    void rescale(int row, float factor) {
        float* sums = sums_.data() + row * sum_stride();
        for (std::int64_t d = 0; d < sum_stride(); ++d) sums[d] *= factor;
        weight_[row] *= factor;
    }

    const Chunk& chunk_;
    std::int64_t head_;
    int count_;
    Lines<Bf16> queries_;
    Lines<float> sums_;  // [rows, head_dim in whole panels]
    std::int64_t at_[kRunRows], first_slot_[kRunRows], end_slot_[kRunRows];
    float most_[kRunRows];
    Floats weight_[kRunRows];  // of all slots so far, lane by lane
};

}  // namespace baton
