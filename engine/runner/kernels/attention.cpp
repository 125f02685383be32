// Paged attention.
//
// There is one way to it, whatever a sequence has in a pass: a chunk of a prompt or a single token.
// The context is taken 256 slots at a time, counted from its first. Rows of queries (token by token,
// all heads that share the KV head) look at them, a few at a time: scores of the slots, weights,
// values. Where many rows look, keys and values are packed into panels first; where few do, they are
// read as they lie, and add up in the same order. So an answer has the same bits however its prompt
// was cut into chunks, whoever is beside it, and whether a token was written in its own step or is
// computed again with others.

#include "calls.h"
#include "pool.h"
#include "rows.h"

#include <memory>

using namespace baton;

namespace {

constexpr float kLog2OfE = 1.44269504f;

// Some of a chunk's rows, of some of the KV heads.
struct Part {
    std::int64_t first_head, end_head, first_row, end_row;
};

std::vector<Rows> rows_of(const Chunk& chunk, const Part& part, bool is_in_place) {
    std::vector<Rows> runs;
    runs.reserve((part.end_head - part.first_head) *
                 ((part.end_row - part.first_row + kRunRows - 1) / kRunRows));
    for (std::int64_t head = part.first_head; head < part.end_head; ++head)
        for (std::int64_t row = part.first_row, count; row < part.end_row; row += count) {
            count = next_run(part.end_row - row, kRunRows);
            runs.emplace_back(chunk, head, row, int(count), is_in_place);
        }
    return runs;
}

// Rows that look at a panel while it is near: with tiles they are so fast that many must share the
// packing, if each thread has a few parts all the same.
std::int64_t rows_at_once(const Chunk& chunk, int num_threads) {
    constexpr std::int64_t kLeast = 512, kMost = kPairsAtOnce > 1 ? 1024 : kLeast;
    const std::int64_t parts = (chunk.num_rows() + kMost - 1) / kMost;
    return parts * chunk.context.cache.num_kv_heads < 8 * num_threads ? kLeast : kMost;
}

// What a thread needs for it.
class Attention {
  public:
    explicit Attention(std::int64_t head_dim) : packed_(head_dim) {}

    void operator()(const Chunk& chunk, const Part& part) {
        const std::int64_t end = chunk.position((part.end_row - 1) / chunk.num_shared) + 1;
        const bool is_in_place = SlotsInPlace::can(chunk.context.cache) &&
                                 part.end_row - part.first_row <= SlotsInPlace::kFewRows;
        std::vector<Rows> runs = rows_of(chunk, part, is_in_place);
        looks_ = std::make_unique_for_overwrite<Look[]>(is_in_place ? runs.size() : 1);
        std::int64_t slot = chunk.first_slot(part.first_row / chunk.num_shared);
        for (slot -= slot % kSlotsAtOnce; slot < end; slot += kSlotsAtOnce)
            if (is_in_place)
                look_in_place(chunk.context, runs, slot, end);
            else
                look_packed(chunk.context, runs, slot, end);
        for (const Rows& rows : runs) rows.answer();
    }

  private:
    // Head by head, as they lie in their blocks.
    void look_packed(const Context& context, std::vector<Rows>& runs, std::int64_t slot,
                     std::int64_t end) {
        for (std::size_t run = 0; run < runs.size(); ++run) {
            if (run == 0 || runs[run].head() != runs[run - 1].head())
                packed_.take(context, runs[run].head(), slot, end);
            if (runs[run].sees(slot)) runs[run].look_at(packed_, slot, looks_[0], tiles_);
        }
    }

    // A block's keys of all heads lie behind each other, and so do its values: read that way,
    // they come faster.
    void look_in_place(const Context& context, std::vector<Rows>& runs, std::int64_t slot,
                       std::int64_t end) {
        in_place_.take(context, slot, end);
        for_each_step(runs, slot, [&](Rows& rows, Look& look, std::int64_t step) {
            rows.score(in_place_, step, look, tiles_);
        });
        for (std::size_t run = 0; run < runs.size(); ++run)
            if (runs[run].sees(slot)) runs[run].weigh(slot, looks_[run]);
        for_each_step(runs, slot, [&](Rows& rows, Look& look, std::int64_t step) {
            rows.add(in_place_, step, look);
        });
    }

    template <typename Each>
    void for_each_step(std::vector<Rows>& runs, std::int64_t slot, Each each) {
        constexpr std::int64_t kStep = SlotsInPlace::kStep;
        for (std::int64_t step = 0; step < in_place_.num_steps(); ++step)
            for (std::size_t run = 0; run < runs.size(); ++run)
                if (runs[run].sees(slot + step * kStep, kStep)) each(runs[run], looks_[run], step);
    }

    PackedSlots packed_;
    SlotsInPlace in_place_;
    Tiles tiles_;
    std::unique_ptr<Look[]> looks_;  // of each run, or of all in turns
};

}  // namespace

extern "C" {

// keys, values: [tokens, kv_heads, head_dim], with strides between tokens.
void baton_write_kv(Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                    std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                    const Bf16* keys, std::int64_t key_stride, const Bf16* values,
                    std::int64_t value_stride, const std::int64_t* write_blocks,
                    const std::int64_t* write_offsets, std::int64_t num_tokens, int num_threads) {
    const Cache cache{blocks, num_layers, num_kv_heads, block_size, head_dim};
    const std::int64_t numbers = 2 * num_kv_heads * head_dim;
    share_out(num_tokens, numbers, num_threads, [=](std::int64_t token, std::int64_t end) {
        for (; token < end; ++token)
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
        Attention attention(head_dim);
        for (std::int64_t task = next++; task < num_sequences * parts; task = next++) {
            const std::int64_t which = task / parts, head = task % parts * at_once;
            const Context context{cache, layer, tables + which * table_stride, lengths[which]};
            const Chunk chunk{context, queries + which * numbers, answers + which * numbers,
                              1, window, num_shared, scale * kLog2OfE};
            attention(chunk, {head, head + at_once, 0, num_shared});
        }
    });
}

// The last tokens of a sequence of `length`.
void baton_attend_chunk(Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                        std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                        const Bf16* queries, Bf16* answers, const std::int64_t* table,
                        std::int64_t num_tokens, std::int64_t length, std::int64_t window,
                        std::int64_t num_shared, float scale, int num_threads) {
    const Cache cache{blocks, num_layers, num_kv_heads, block_size, head_dim};
    const Context context{cache, layer, table, length};
    const Chunk chunk{context, queries, answers, num_tokens, window, num_shared, scale * kLog2OfE};
    const std::int64_t at_once = rows_at_once(chunk, num_threads);
    const std::int64_t parts = (chunk.num_rows() + at_once - 1) / at_once;
    std::atomic<std::int64_t> next{0};
    Pool::of_process().run(num_threads, [&](int, int) {
        Attention attention(head_dim);
        for (std::int64_t task = next++; task < num_kv_heads * parts; task = next++) {
            // The last part first: it takes longest.
            const std::int64_t head = task % num_kv_heads;
            const std::int64_t first = (parts - 1 - task / num_kv_heads) * at_once;
            const std::int64_t end = std::min(first + at_once, chunk.num_rows());
            attention(chunk, {head, head + 1, first, end});
        }
    });
}

}  // extern "C"
