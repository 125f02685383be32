// Paged attention.
//
// Prompt chunks and single tokens use one algorithm: online softmax over the context, 256 slots at
// a time, counted from its first slot. Query rows, ordered by token and then by the heads of a GQA
// group, are processed a few at a time: scores of the slots, softmax weights, weighted sum of
// values. For many rows, keys and values are packed into panels first. For few rows they are read
// in place and summed in the same order. So the output is bit-identical for all ways to split a
// prompt into chunks, for all batches, and for tokens that are computed again after preemption.

#include "calls.h"
#include "pool.h"
#include "rows.h"

#include <memory>

using namespace baton;

namespace {

constexpr float kLog2OfE = 1.44269504f;

// A unit of work: a range of a chunk's query rows for a range of KV heads.
struct Part {
    std::int64_t first_head, end_head, first_row, end_row;
};

std::vector<QueryRows> rows_of(const Chunk& chunk, const Part& part, bool is_in_place) {
    std::vector<QueryRows> runs;
    runs.reserve((part.end_head - part.first_head) *
                 ((part.end_row - part.first_row + kRunRows - 1) / kRunRows));
    for (std::int64_t head = part.first_head; head < part.end_head; ++head)
        for (std::int64_t row = part.first_row, count; row < part.end_row; row += count) {
            count = next_run(part.end_row - row, kRunRows);
            runs.emplace_back(chunk, head, row, int(count), is_in_place);
        }
    return runs;
}

// Query rows that share the packed panels of one unit of work. With AMX the products are so fast
// that more rows must share the cost of packing, as long as each thread still gets a few units.
std::int64_t rows_at_once(const Chunk& chunk, int num_threads) {
    constexpr std::int64_t kMin = 512, kMax = kPairsAtOnce > 1 ? 1024 : kMin;
    const std::int64_t parts = (chunk.num_rows() + kMax - 1) / kMax;
    return parts * chunk.context.cache.num_kv_heads < 8 * num_threads ? kMin : kMax;
}

// Attention of one thread, with its buffers.
class Attention {
  public:
    explicit Attention(std::int64_t head_dim) : packed_(head_dim) {}

    void operator()(const Chunk& chunk, const Part& part) {
        const std::int64_t end = chunk.position((part.end_row - 1) / chunk.gqa_group_size) + 1;
        const bool is_in_place = SlotsInPlace::supports(chunk.context.cache) &&
                                 part.end_row - part.first_row <= SlotsInPlace::kFewRows;
        std::vector<QueryRows> runs = rows_of(chunk, part, is_in_place);
        score_tiles_ = std::make_unique_for_overwrite<ScoreTile[]>(is_in_place ? runs.size() : 1);
        std::int64_t slot = chunk.first_slot(part.first_row / chunk.gqa_group_size);
        for (slot -= slot % kSlotsAtOnce; slot < end; slot += kSlotsAtOnce)
            if (is_in_place)
                attend_in_place(chunk.context, runs, slot, end);
            else
                attend_packed(chunk.context, runs, slot, end);
        for (const QueryRows& rows : runs) rows.write_output();
    }

  private:
    // Packs keys and values head by head.
    void attend_packed(const Context& context, std::vector<QueryRows>& runs, std::int64_t slot,
                       std::int64_t end) {
        for (std::size_t run = 0; run < runs.size(); ++run) {
            if (run == 0 || runs[run].head() != runs[run - 1].head())
                packed_.load(context, runs[run].head(), slot, end);
            if (runs[run].overlaps(slot)) runs[run].attend(packed_, slot, score_tiles_[0], tiles_);
        }
    }

    // Reads step by step through all heads: a block's keys of all heads are contiguous, and so are
    // its values, and sequential reads are faster.
    void attend_in_place(const Context& context, std::vector<QueryRows>& runs, std::int64_t slot,
                         std::int64_t end) {
        in_place_.load(context, slot, end);
        for_each_step(runs, slot, [&](QueryRows& rows, ScoreTile& tile, std::int64_t step) {
            rows.score(in_place_, step, tile, tiles_);
        });
        for (std::size_t run = 0; run < runs.size(); ++run)
            if (runs[run].overlaps(slot)) runs[run].softmax(slot, score_tiles_[run]);
        for_each_step(runs, slot, [&](QueryRows& rows, ScoreTile& tile, std::int64_t step) {
            rows.add(in_place_, step, tile);
        });
    }

    template <typename Each>
    void for_each_step(std::vector<QueryRows>& runs, std::int64_t slot, Each each) {
        constexpr std::int64_t kStep = SlotsInPlace::kStep;
        for (std::int64_t step = 0; step < in_place_.num_steps(); ++step)
            for (std::size_t run = 0; run < runs.size(); ++run)
                if (runs[run].overlaps(slot + step * kStep, kStep))
                    each(runs[run], score_tiles_[run], step);
    }

    PackedSlots packed_;
    SlotsInPlace in_place_;
    Tiles tiles_;
    std::unique_ptr<ScoreTile[]> score_tiles_;  // one per run, or a single one that all runs share
};

}  // namespace

extern "C" {

// Writes keys and values, [tokens, kv_heads, head_dim], into the cache. Strides are between tokens.
void baton_write_kv(Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                    std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                    const Bf16* keys, std::int64_t key_stride, const Bf16* values,
                    std::int64_t value_stride, const std::int64_t* write_blocks,
                    const std::int64_t* write_offsets, std::int64_t num_tokens, int num_threads) {
    const Cache cache{blocks, num_layers, num_kv_heads, block_size, head_dim};
    const std::int64_t numbers = 2 * num_kv_heads * head_dim;
    parallel_for(num_tokens, numbers, num_threads, [=](std::int64_t token, std::int64_t end) {
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

// Attention for one token of each sequence, over its `lengths` slots or the last `window` of them.
void baton_attend_singles(Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                          std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                          const Bf16* queries, Bf16* dst, const std::int64_t* tables,
                          std::int64_t table_stride, const std::int64_t* lengths,
                          std::int64_t window, std::int64_t num_sequences,
                          std::int64_t gqa_group_size, float scale, int num_threads) {
    const Cache cache{blocks, num_layers, num_kv_heads, block_size, head_dim};
    const std::int64_t numbers = num_kv_heads * gqa_group_size * head_dim;  // of a token
    std::int64_t at_once = num_kv_heads;  // heads
    while (num_sequences * (num_kv_heads / at_once) < num_threads && at_once % 2 == 0) at_once /= 2;
    const std::int64_t parts = num_kv_heads / at_once;
    std::atomic<std::int64_t> next{0};
    Pool::instance().run(num_threads, [&](int, int) {
        Attention attention(head_dim);
        for (std::int64_t task = next++; task < num_sequences * parts; task = next++) {
            const std::int64_t which = task / parts, head = task % parts * at_once;
            const Context context{cache, layer, tables + which * table_stride, lengths[which]};
            const Chunk chunk{context, queries + which * numbers, dst + which * numbers,
                              1, window, gqa_group_size, scale * kLog2OfE};
            attention(chunk, {head, head + at_once, 0, gqa_group_size});
        }
    });
}

// Attention for the last `num_tokens` tokens of a sequence of `length` tokens.
void baton_attend_chunk(Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                        std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                        const Bf16* queries, Bf16* dst, const std::int64_t* table,
                        std::int64_t num_tokens, std::int64_t length, std::int64_t window,
                        std::int64_t gqa_group_size, float scale, int num_threads) {
    const Cache cache{blocks, num_layers, num_kv_heads, block_size, head_dim};
    const Context context{cache, layer, table, length};
    const Chunk chunk{context, queries, dst, num_tokens, window, gqa_group_size, scale * kLog2OfE};
    const std::int64_t at_once = rows_at_once(chunk, num_threads);
    const std::int64_t parts = (chunk.num_rows() + at_once - 1) / at_once;
    std::atomic<std::int64_t> next{0};
    Pool::instance().run(num_threads, [&](int, int) {
        Attention attention(head_dim);
        for (std::int64_t task = next++; task < num_kv_heads * parts; task = next++) {
            // The last part takes longest, so it is first.
            const std::int64_t head = task % num_kv_heads;
            const std::int64_t first = (parts - 1 - task / num_kv_heads) * at_once;
            const std::int64_t end = std::min(first + at_once, chunk.num_rows());
            attention(chunk, {head, head + 1, first, end});
        }
    });
}

}  // extern "C"
