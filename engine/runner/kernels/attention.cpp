// Paged attention.
//
// There is one way to it, whatever a sequence has in a pass: a chunk of a prompt or a single token.
// The context is cut into panels of 64 slots, counted from its first. A panel's keys and values are
// packed; then rows of queries (token by token, all heads that share the KV head) look at it, a few
// at a time: scores of the slots, weights, values, each as a product with a panel. So an answer has
// the same bits however its prompt was cut into chunks, whoever is beside it, and whether a token
// was written in its own step or is computed again with others.

#include "calls.h"
#include "context.h"
#include "pool.h"
#include "tiles.h"

#include <limits>

using namespace baton;

namespace {

constexpr float kLog2OfE = 1.44269504f;
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

// A few query rows on their way over the context.
class Rows {
  public:
    Rows(const Chunk& chunk, const ContextPanel& packed, std::int64_t head, std::int64_t first,
         int count)
        : chunk_(chunk), packed_(packed), head_(head), count_(count),
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
    }

    std::int64_t head() const { return head_; }

    bool sees(std::int64_t panel) const {
        return first_slot_[0] < (panel + 1) * kPanelRows &&
               panel * kPanelRows < end_slot_[count_ - 1];
    }

    void look_at(std::int64_t panel, Tiles& tiles) {
        const std::int64_t size = chunk_.context.cache.head_dim;
        Floats scores[kRunRows][kVectors] = {};
        add_rows(tiles, &scores[0][0][0], kPanelRows, queries_.data(), size, count_,
                 packed_.keys(), packed_.pairs());
        for (int row = 0; row < count_; ++row) {
            const std::int64_t begin = first_slot_[row] - panel * kPanelRows;
            const std::int64_t end = end_slot_[row] - panel * kPanelRows;
            if (begin > 0 || end < kPanelRows) hide(scores[row], begin, end);
            weigh(row, scores[row]);
        }
        for (std::int64_t part = 0; part < packed_.wide(); ++part)
            add_rows(tiles, sums_.data() + part * kPanelRows, sum_stride(), weights_[0], kPanelRows,
                     count_, packed_.values(part), packed_.slot_pairs());
    }

    void answer() const {
        for (int row = 0; row < count_; ++row) {
            const float weight = sum(weight_[row]);
            for (std::int64_t d = 0; d < chunk_.context.cache.head_dim; ++d)
                chunk_.answers[at_[row] + d] = narrow(sums_[row * sum_stride() + d] / weight);
        }
    }

  private:
    std::int64_t sum_stride() const { return packed_.wide() * kPanelRows; }

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
        if (most != most_[row]) rescale(row, std::exp2((most_[row] - most) * chunk_.scale));
        most_[row] = most;
        // If none of these is seen by this row, all are the largest and none weighs anything.
        const float shift = most == kNever ? 0.0f : most * chunk_.scale;
        Floats weight = weight_[row];
        for (int v = 0; v < kVectors; ++v) {
            const Floats weights = power_of_two(scores[v] * chunk_.scale - shift);
            store(weights_[row] + v * kLanes, weights);
            weight += weights;
        }
        weight_[row] = weight;
    }

    void rescale(int row, float factor) {
        float* sums = sums_.data() + row * sum_stride();
        for (std::int64_t d = 0; d < sum_stride(); ++d) sums[d] *= factor;
        weight_[row] *= factor;
    }

    const Chunk& chunk_;
    const ContextPanel& packed_;
    std::int64_t head_;
    int count_;
    std::vector<Bf16> queries_;
    std::vector<float> sums_;  // [rows, head_dim in whole panels]
    std::int64_t at_[kRunRows], first_slot_[kRunRows], end_slot_[kRunRows];
    float most_[kRunRows];
    Floats weight_[kRunRows];  // of all slots so far, lane by lane
    alignas(64) Bf16 weights_[kRunRows][kPanelRows];
};

// Some of a chunk's rows, of some of the KV heads.
struct Part {
    std::int64_t first_head, end_head, first_row, end_row;
};

// Panel by panel, and in each head by head as they lie in their blocks.
void attend(const Chunk& chunk, const Part& part, ContextPanel& packed, Tiles& tiles) {
    std::vector<Rows> runs;
    for (std::int64_t head = part.first_head; head < part.end_head; ++head)
        for (std::int64_t row = part.first_row, count; row < part.end_row; row += count) {
            count = next_run(part.end_row - row, kRunRows);
            runs.emplace_back(chunk, packed, head, row, int(count));
        }
    const std::int64_t last = chunk.position((part.end_row - 1) / chunk.num_shared);
    std::int64_t panel = chunk.first_slot(part.first_row / chunk.num_shared) / kPanelRows;
    for (; panel <= last / kPanelRows; ++panel)
        for (std::size_t run = 0; run < runs.size(); ++run) {
            if (run == 0 || runs[run].head() != runs[run - 1].head())
                packed.take(chunk.context, runs[run].head(), panel);
            if (runs[run].sees(panel)) runs[run].look_at(panel, tiles);
        }
    for (const Rows& rows : runs) rows.answer();
}

}  // namespace

extern "C" {

// keys, values: [tokens, kv_heads, head_dim], with strides between tokens.
void baton_write_kv(Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                    std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                    const Bf16* keys, std::int64_t key_stride, const Bf16* values,
                    std::int64_t value_stride, const std::int64_t* write_blocks,
                    const std::int64_t* write_offsets, std::int64_t num_tokens, int num_threads) {
    const Cache cache{blocks, num_layers, num_kv_heads, block_size, head_dim};
    const std::int64_t numbers = 2 * num_tokens * num_kv_heads * head_dim;
    Pool::of_process().run(threads_for(numbers, num_threads), [=](int i, int count) {
        const Share share(num_tokens, i, count);
        for (std::int64_t token = share.first; token < share.end; ++token)
            for (std::int64_t head = 0; head < num_kv_heads; ++head) {
                const std::int64_t block = write_blocks[token];
                const std::int64_t at = write_offsets[token] * head_dim;
                const std::size_t bytes = head_dim * sizeof(Bf16);
                std::memcpy(cache.slots(block, layer, 0, head) + at,
                            keys + token * key_stride + head * head_dim, bytes);
                std::memcpy(cache.slots(block, layer, 1, head) + at,
                            values + token * value_stride + head * head_dim, bytes);
            }
    });
}

// One token of each sequence, which sees `lengths` slots of its blocks, or the last `window`.
void baton_attend_singles(Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                          std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                          const Bf16* queries, Bf16* answers, const std::int64_t* tables,
                          std::int64_t table_stride, const std::int64_t* lengths,
                          std::int64_t window, std::int64_t num_sequences,
                          std::int64_t num_shared, float scale, int num_threads) {
    const Cache cache{blocks, num_layers, num_kv_heads, block_size, head_dim};
    const std::int64_t numbers = num_kv_heads * num_shared * head_dim;  // of a token
    std::int64_t at_once = num_kv_heads;  // heads
    while (num_sequences * (num_kv_heads / at_once) < num_threads && at_once % 2 == 0) at_once /= 2;
    const std::int64_t parts = num_kv_heads / at_once;
    std::atomic<std::int64_t> next{0};
    Pool::of_process().run(num_threads, [&](int, int) {
        ContextPanel packed(head_dim);
        Tiles tiles;
        for (std::int64_t task = next++; task < num_sequences * parts; task = next++) {
            const std::int64_t which = task / parts, head = task % parts * at_once;
            const Context context{cache, layer, tables + which * table_stride, lengths[which]};
            const Chunk chunk{context, queries + which * numbers, answers + which * numbers,
                              1, window, num_shared, scale * kLog2OfE};
            attend(chunk, {head, head + at_once, 0, num_shared}, packed, tiles);
        }
    });
}

// The last tokens of a sequence of `length`.
void baton_attend_chunk(Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                        std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                        const Bf16* queries, Bf16* answers, const std::int64_t* table,
                        std::int64_t num_tokens, std::int64_t length, std::int64_t window,
                        std::int64_t num_shared, float scale, int num_threads) {
    constexpr std::int64_t kRowsAtOnce = 384;  // look at a panel while it is near
    const Cache cache{blocks, num_layers, num_kv_heads, block_size, head_dim};
    const Context context{cache, layer, table, length};
    const Chunk chunk{context, queries, answers, num_tokens, window, num_shared, scale * kLog2OfE};
    const std::int64_t parts = (chunk.num_rows() + kRowsAtOnce - 1) / kRowsAtOnce;
    std::atomic<std::int64_t> next{0};
    Pool::of_process().run(num_threads, [&](int, int) {
        ContextPanel packed(head_dim);
        Tiles tiles;
        for (std::int64_t task = next++; task < num_kv_heads * parts; task = next++) {
            const std::int64_t head = task / parts, first = task % parts * kRowsAtOnce;
            const std::int64_t end = std::min(first + kRowsAtOnce, chunk.num_rows());
            attend(chunk, {head, head + 1, first, end}, packed, tiles);
        }
    });
}

}  // extern "C"
