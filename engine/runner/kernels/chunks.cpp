// Paged attention of a run of tokens of one sequence.
//
// A thread takes one KV head at a time. It packs the head's keys and values into panels, then
// goes over the query rows (token by token, all heads that share the KV head) a few at a time:
// scores of 64 slots, weights, values of 64 slots, each as a product with a panel.

#include "cache.h"
#include "panels.h"
#include "pool.h"

#include <algorithm>
#include <limits>
#include <vector>

using namespace baton;

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

struct Chunk {
    Cache cache;
    std::int64_t layer;
    const Bf16* queries;  // [tokens, heads, head_dim]
    Bf16* answers;        // the same
    const std::int64_t* table;
    std::int64_t num_tokens, length, window, num_shared;
    float scale;

    std::int64_t position(std::int64_t token) const { return length - num_tokens + token; }
    std::int64_t first_slot(std::int64_t token) const {
        return window > 0 ? std::max<std::int64_t>(0, position(token) - window + 1) : 0;
    }
};

// One KV head's keys and values, packed; slots count from the first that the chunk sees.
class Packed {
  public:
    void pack(const Chunk& chunk, std::int64_t head) {
        const Cache& cache = chunk.cache;
        base_ = chunk.first_slot(0);
        pairs_ = cache.head_dim / 2;
        wide_ = (cache.head_dim + kPanelRows - 1) / kPanelRows;
        const std::int64_t num_slots = chunk.length - base_;
        const std::int64_t num_panels = (num_slots + kPanelRows - 1) / kPanelRows;
        keys_.assign(num_panels * kPanelRows * pairs_, 0);
        values_.assign(num_panels * kPanelRows / 2 * wide_ * kPanelRows, 0);
        for (std::int64_t slot = 0; slot < num_slots; ++slot) {
            const std::int64_t at = base_ + slot, block = chunk.table[at / cache.block_size];
            const std::int64_t within = at % cache.block_size * cache.head_dim;
            pack_key(slot, cache.slots(block, chunk.layer, 0, head) + within);
            pack_value(slot, cache.slots(block, chunk.layer, 1, head) + within, cache.head_dim);
        }
    }

    std::int64_t base() const { return base_; }
    std::int64_t pairs() const { return pairs_; }
    std::int64_t wide() const { return wide_; }  // panels of a value
    const Words* keys(std::int64_t panel) const {
        return reinterpret_cast<const Words*>(keys_.data() + panel * kPanelRows * pairs_);
    }
    const Words* values(std::int64_t panel, std::int64_t part) const {
        return reinterpret_cast<const Words*>(values_.data() + value_at(panel, part));
    }

  private:
    std::int64_t value_at(std::int64_t panel, std::int64_t part) const {
        return (panel * wide_ + part) * (kPanelRows / 2) * kPanelRows;
    }

    void pack_key(std::int64_t slot, const Bf16* key) {
        std::uint32_t* words = keys_.data() + slot / kPanelRows * kPanelRows * pairs_;
        for (std::int64_t pair = 0; pair < pairs_; ++pair)
            std::memcpy(words + pair * kPanelRows + slot % kPanelRows, key + 2 * pair, 4);
    }

    void pack_value(std::int64_t slot, const Bf16* value, std::int64_t size) {
        const std::int64_t within = slot % kPanelRows;
        for (std::int64_t d = 0; d < size; ++d) {
            const std::int64_t part = d / kPanelRows;
            std::uint32_t& word = values_[value_at(slot / kPanelRows, part) +
                                          within / 2 * kPanelRows + d % kPanelRows];
            word |= std::uint32_t(value[d]) << (within % 2 * 16);
        }
    }

    std::int64_t base_ = 0, pairs_ = 0, wide_ = 0;
    std::vector<std::uint32_t> keys_, values_;
};

// A few query rows on their way over the context.
class Rows {
  public:
    Rows(const Chunk& chunk, const Packed& packed, std::int64_t head, std::int64_t first, int count)
        : chunk_(chunk), packed_(packed), count_(count),
          sums_(count * packed.wide() * kPanelRows) {
        const std::int64_t size = chunk.cache.head_dim;
        const std::int64_t num_heads = chunk.cache.num_kv_heads * chunk.num_shared;
        for (int row = 0; row < count; ++row) {
            const std::int64_t token = (first + row) / chunk.num_shared;
            const std::int64_t shared = (first + row) % chunk.num_shared;
            at_[row] = (token * num_heads + head * chunk.num_shared + shared) * size;
            first_slot_[row] = chunk.first_slot(token) - packed.base();
            end_slot_[row] = chunk.position(token) + 1 - packed.base();
            most_[row] = kNever;
            weight_[row] = 0.0f;
        }
    }

    bool sees(std::int64_t panel) const {
        return first_slot_[0] < (panel + 1) * kPanelRows &&
               panel * kPanelRows < end_slot_[count_ - 1];
    }

    void look_at(std::int64_t panel) {
        constexpr void (Rows::*kLook[])(std::int64_t) = {
            nullptr, &Rows::look<1>, &Rows::look<2>,
#if defined(__AVX512BF16__)
            &Rows::look<3>, &Rows::look<4>, &Rows::look<5>, &Rows::look<6>,
#endif
        };
        (this->*kLook[count_])(panel);
    }

    void answer() const {
        for (int row = 0; row < count_; ++row)
            for (std::int64_t d = 0; d < chunk_.cache.head_dim; ++d)
                chunk_.answers[at_[row] + d] = narrow(sums_[sum_at(row) + d] / weight_[row]);
    }

  private:
    std::int64_t sum_at(int row) const { return row * packed_.wide() * kPanelRows; }

    template <int ROWS>
    void look(std::int64_t panel) {
        score<ROWS>(panel);
        add_values<ROWS>(panel);
    }

    template <int ROWS>
    void score(std::int64_t panel) {
        const std::uint32_t* queries[ROWS];
        for (int row = 0; row < ROWS; ++row)
            queries[row] = reinterpret_cast<const std::uint32_t*>(chunk_.queries + at_[row]);
        Totals<ROWS> totals = {};
        add_panel<ROWS>(totals, queries, packed_.keys(panel), packed_.pairs(),
                        packed_.keys(panel) + kAhead);
        for (int row = 0; row < ROWS; ++row) {
            for (int v = 0; v < kVectors; ++v) totals[row][v] *= chunk_.scale;
            const std::int64_t begin = first_slot_[row] - panel * kPanelRows;
            const std::int64_t end = end_slot_[row] - panel * kPanelRows;
            if (begin > 0 || end < kPanelRows) hide(totals[row], begin, end);
            weigh(row, totals[row]);
        }
    }

    static void hide(Floats (&scores)[kVectors], std::int64_t begin, std::int64_t end) {
        float seen[kPanelRows];
        std::memcpy(seen, scores, sizeof seen);
        for (std::int64_t i = 0; i < kPanelRows; ++i)
            if (i < begin || i >= end) seen[i] = kNever;
        std::memcpy(scores, seen, sizeof seen);
    }

    // Scores become weights relative to the largest so far, and the sums are brought to the same.
    void weigh(int row, const Floats (&scores)[kVectors]) {
        Floats larger = fill(most_[row]);
        for (int v = 0; v < kVectors; ++v) larger = scores[v] > larger ? scores[v] : larger;
        const float most = largest(larger);
        const float shift = most == kNever ? 0.0f : most;  // none of these is seen by this row
        Floats total{};
        for (int v = 0; v < kVectors; ++v) {
            const Floats weights = attention_weight(scores[v] - shift);
            store(weights_[row] + v * kLanes, weights);
            total += weights;
        }
        if (most != most_[row]) rescale(row, std::exp(most_[row] - most));
        weight_[row] += sum(total);
        most_[row] = most;
    }

    void rescale(int row, float factor) {
        float* sums = sums_.data() + sum_at(row);
        for (std::int64_t d = 0; d < packed_.wide() * kPanelRows; ++d) sums[d] *= factor;
        weight_[row] *= factor;
    }

    template <int ROWS>
    void add_values(std::int64_t panel) {
        const std::uint32_t* weights[ROWS];
        for (int row = 0; row < ROWS; ++row)
            weights[row] = reinterpret_cast<const std::uint32_t*>(weights_[row]);
        for (std::int64_t part = 0; part < packed_.wide(); ++part) {
            float* sums = sums_.data() + part * kPanelRows;
            Totals<ROWS> totals;
            for (int row = 0; row < ROWS; ++row)
                std::memcpy(totals[row], sums + sum_at(row), sizeof totals[row]);
            const Words* values = packed_.values(panel, part);
            add_panel<ROWS>(totals, weights, values, kPanelRows / 2, values + kAhead);
            for (int row = 0; row < ROWS; ++row)
                std::memcpy(sums + sum_at(row), totals[row], sizeof totals[row]);
        }
    }

    const Chunk& chunk_;
    const Packed& packed_;
    int count_;
    std::vector<float> sums_;  // [rows, head_dim in whole panels]
    std::int64_t at_[kMostRows], first_slot_[kMostRows], end_slot_[kMostRows];
    float most_[kMostRows], weight_[kMostRows];
    alignas(64) Bf16 weights_[kMostRows][kPanelRows];
};

// All tokens of a chunk for one KV head. Many rows look at a panel while it is near.
void attend_head(const Chunk& chunk, const Packed& packed, std::int64_t head) {
    constexpr int kRunsAtOnce = 16;
    const std::int64_t num_rows = chunk.num_tokens * chunk.num_shared;
    const std::int64_t num_panels = (chunk.length - packed.base() + kPanelRows - 1) / kPanelRows;
    std::vector<Rows> runs;
    for (std::int64_t first = 0; first < num_rows;) {
        runs.clear();
        for (int i = 0; i < kRunsAtOnce && first < num_rows; ++i) {
            const int count = next_run(num_rows - first);
            runs.emplace_back(chunk, packed, head, first, count);
            first += count;
        }
        for (std::int64_t panel = 0; panel < num_panels; ++panel)
            for (Rows& rows : runs)
                if (rows.sees(panel)) rows.look_at(panel);
        for (const Rows& rows : runs) rows.answer();
    }
}

}  // namespace

extern "C" {

// The last tokens of a sequence of `length`, whose keys and values are all in their slots.
void baton_attend_chunk(Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                        std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                        const Bf16* queries, Bf16* answers, const std::int64_t* table,
                        std::int64_t num_tokens, std::int64_t length, std::int64_t window,
                        std::int64_t num_shared, float scale, int num_threads) {
    const Chunk chunk{{blocks, num_layers, num_kv_heads, block_size, head_dim},
                      layer, queries, answers, table, num_tokens, length, window, num_shared, scale};
    std::atomic<std::int64_t> next{0};
    Pool::of_process().run(num_threads, [&](int, int) {
        Packed packed;
        for (std::int64_t head = next++; head < num_kv_heads; head = next++) {
            packed.pack(chunk, head);
            attend_head(chunk, packed, head);
        }
    });
}

}  // extern "C"
