// Paged attention.
//
// Prompt chunks and single tokens use one algorithm: online softmax over the context, 256 slots at
// a time, counted from its first slot. Query rows, ordered by token and then by the heads of a GQA
// group, are processed a few at a time: scores of the slots, softmax weights, weighted sum of
// values. For many rows, keys and values are packed into panels first. For few rows they are read
// in place and summed in the same order. So the output is bit-identical for all ways to split a
// prompt into chunks, for all batches, and for tokens that are computed again after preemption.

#include "abi.h"
#include "query_rows.h"
#include "thread_pool.h"

#include <atomic>
#include <memory>

using namespace baton;

namespace {

// A unit of work: a range of a chunk's query rows for a range of KV heads.
struct Part {
    std::int64_t first_head, end_head, first_row, end_row;
};

std::vector<QueryRows> rows_of(const Chunk& chunk, const Part& part, bool is_unpacked) {
    std::vector<QueryRows> runs;
    runs.reserve((part.end_head - part.first_head) *
                 ((part.end_row - part.first_row + kRunRows - 1) / kRunRows));
    for (std::int64_t head = part.first_head; head < part.end_head; ++head)
        for (std::int64_t row = part.first_row, count; row < part.end_row; row += count) {
            count = next_run(part.end_row - row, kRunRows);
            runs.emplace_back(chunk, head, row, int(count), is_unpacked);
        }
    return runs;
}

// Query rows that share the packed panels of one unit of work. With AMX the products are so fast
// that more rows must share the cost of packing, as long as each thread still gets a few units.
std::int64_t rows_at_once(const Chunk& chunk, int num_threads) {
    constexpr std::int64_t kMin = 512, kMax = kPairsPerTile > 1 ? 1024 : kMin;
    const std::int64_t parts = (chunk.num_rows() + kMax - 1) / kMax;
    return parts * chunk.context.kv.num_kv_heads < 8 * num_threads ? kMin : kMax;
}

// Attention of one thread, with its buffers.
class Attention {
  public:
    explicit Attention(const PagedKv& kv) : packed_(kv) {}

    void operator()(const Chunk& chunk, const Part& part) {
        const std::int64_t end = chunk.end_slot((part.end_row - 1) / chunk.gqa_group_size);
        const bool is_unpacked =
            part.end_row - part.first_row <= UnpackedSlots::max_query_rows(chunk.context.kv);
        std::vector<QueryRows> runs = rows_of(chunk, part, is_unpacked);
        score_tiles_ = std::make_unique_for_overwrite<ScoreTile[]>(is_unpacked ? runs.size() : 1);
        KvContext context = chunk.context;
        context.begin = chunk.first_slot(part.first_row / chunk.gqa_group_size);
        std::int64_t slot = context.begin;
        for (slot -= slot % kScoreTileSlots; slot < end; slot += kScoreTileSlots)
            if (is_unpacked)
                attend_unpacked(context, runs, slot, end);
            else
                attend_packed(context, runs, slot, end);
        for (const QueryRows& rows : runs) rows.write_output();
    }

  private:
    // Packs keys and values head by head.
    void attend_packed(const KvContext& context, std::vector<QueryRows>& runs, std::int64_t slot,
                       std::int64_t end) {
        for (std::size_t run = 0; run < runs.size(); ++run) {
            if (run == 0 || runs[run].head() != runs[run - 1].head())
                packed_.load(context, runs[run].head(), slot, end);
            if (runs[run].overlaps(slot))
                runs[run].attend(packed_, slot, score_tiles_[0], tile_config_);
        }
    }

    // Reads step by step through all heads: a block's keys of all heads are contiguous, and so are
    // its values, and sequential reads are faster.
    void attend_unpacked(const KvContext& context, std::vector<QueryRows>& runs, std::int64_t slot,
                         std::int64_t end) {
        unpacked_.load(context, slot, end);
        for_each_step(runs, slot, [&](QueryRows& rows, ScoreTile& tile, std::int64_t step) {
            rows.score(unpacked_, step, tile, tile_config_);
        });
        for (std::size_t run = 0; run < runs.size(); ++run)
            if (runs[run].overlaps(slot))
                runs[run].softmax(slot, score_tiles_[run],
                                  unpacked_.scales(runs[run].head(), scales_));
        for_each_step(runs, slot, [&](QueryRows& rows, ScoreTile& tile, std::int64_t step) {
            rows.add(unpacked_, step, tile);
        });
    }

    template <typename Each>
    void for_each_step(std::vector<QueryRows>& runs, std::int64_t slot, Each each) {
        constexpr std::int64_t kStepSlots = UnpackedSlots::kStepSlots;
        for (std::int64_t step = 0; step < unpacked_.num_steps(); ++step)
            for (std::size_t run = 0; run < runs.size(); ++run)
                if (runs[run].overlaps(slot + step * kStepSlots, kStepSlots))
                    each(runs[run], score_tiles_[run], step);
    }

    PackedSlots packed_;
    UnpackedSlots unpacked_;
    SlotScales scales_;
    TileConfig tile_config_;
    std::unique_ptr<ScoreTile[]> score_tiles_;  // one per run, or a single one that all runs share
};

// Attention for one token of each of the first num_single sequences.
void attend_singles(const AttentionArgs& args) {
    const PagedKv& kv = args.kv;
    const BatchLayout& batch = args.batch;
    const std::int64_t gqa_group_size = args.num_heads / kv.num_kv_heads;
    std::int64_t at_once = kv.num_kv_heads;  // heads
    while (batch.num_single * (kv.num_kv_heads / at_once) < args.num_threads && at_once % 2 == 0)
        at_once /= 2;
    // Threads can share the only head of a latent cache: products take longer than reading it.
    std::int64_t num_rows = gqa_group_size;
    while (kv.num_tensors == 1 && at_once == 1 && num_rows % 2 == 0 &&
           batch.num_single * (args.num_heads / num_rows) < args.num_threads)
        num_rows /= 2;
    const std::int64_t row_parts = gqa_group_size / num_rows;
    const std::int64_t parts = kv.num_kv_heads / at_once * row_parts;
    std::atomic<std::int64_t> next{0};
    run_parallel(args.num_threads, [&](int, int) {
        Attention attention(kv);
        for (std::int64_t task = next++; task < batch.num_single * parts; task = next++) {
            const std::int64_t sequence = task / parts, part = task % parts;
            const std::int64_t head = part / row_parts * at_once;
            const std::int64_t row = part % row_parts * num_rows;
            const Chunk chunk(args, sequence, sequence * args.num_heads, 1);
            attention(chunk, {head, head + at_once, row, row + num_rows});
        }
    });
}

// Attention for the tokens of one sequence.
void attend_chunk(const AttentionArgs& args, std::int64_t sequence) {
    const std::int64_t num_kv_heads = args.kv.num_kv_heads;
    const std::int64_t first = args.batch.query_starts[sequence] * args.num_heads;
    const Chunk chunk(args, sequence, first, args.batch.num_queries[sequence]);
    const std::int64_t at_once = rows_at_once(chunk, args.num_threads);
    const std::int64_t parts = (chunk.num_rows() + at_once - 1) / at_once;
    std::atomic<std::int64_t> next{0};
    run_parallel(args.num_threads, [&](int, int) {
        Attention attention(args.kv);
        for (std::int64_t task = next++; task < num_kv_heads * parts; task = next++) {
            // The last part takes longest, so it is first.
            const std::int64_t head = task % num_kv_heads;
            const std::int64_t first = (parts - 1 - task / num_kv_heads) * at_once;
            const std::int64_t end = std::min(first + at_once, chunk.num_rows());
            attention(chunk, {head, head + 1, first, end});
        }
    });
}

// Writes the key (key_or_value = 0) or the value (1) of a token and head.
void write_slot(const WriteKvArgs& args, std::int64_t token, int key_or_value, std::int64_t head) {
    const PagedKv& kv = args.kv;
    const Bf16* const numbers =
        head * kv.head_dim + (key_or_value == 0 ? args.keys + token * args.key_stride
                                                : args.values + token * args.value_stride);
    Bf16* const slot = kv.slots(args.batch.write_blocks[token], args.layer, key_or_value, head) +
                       args.batch.write_offsets[token] * kv.slot_size();
    if (kv.is_int8) return quantize_int8(numbers, kv.head_dim, slot);
    if (kv.scales == nullptr)
        std::memcpy(slot, numbers, kv.head_dim * sizeof(Bf16));
    else
        quantize_fp8(numbers, kv.head_dim, kv.scale(args.layer, key_or_value, head), slot);
}

}  // namespace

extern "C" {

void baton_write_kv(const WriteKvArgs* args) {
    const PagedKv& kv = args->kv;
    const auto write = [&](std::int64_t token, std::int64_t end) {
        for (; token < end; ++token)
            for (std::int64_t head = 0; head < kv.num_kv_heads; ++head)
                for (int tensor = 0; tensor < kv.num_tensors; ++tensor)
                    write_slot(*args, token, tensor, head);
    };
    const std::int64_t numbers = 2 * kv.num_kv_heads * kv.head_dim;
    parallel_for(args->batch.num_tokens, numbers, args->num_threads, write);
}

void baton_attention(const AttentionArgs* args) {
    if (args->batch.num_single > 0) attend_singles(*args);
    for (std::int64_t i = args->batch.num_single; i < args->batch.num_sequences; ++i)
        attend_chunk(*args, i);
}

}  // extern "C"
