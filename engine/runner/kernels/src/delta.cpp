// Linear attention by the gated delta rule, in recurrent form: one token after the other, with a
// fixed order of additions. So the bits of a token do not depend on the chunks of its sequence.

#include "gate.h"
#include "thread_pool.h"

#include <algorithm>
#include <vector>

using namespace baton;

namespace {

constexpr float kNormEpsilon = 1e-6f;  // of queries and keys
constexpr int kSliceRegs = 4;
constexpr int kSliceColumns = kSliceRegs * kRegLanes;  // of a state, kept in the L1 cache
using RegSlice = F32Reg[kSliceRegs];

struct alignas(64) CacheLine {
    char bytes[64];
};

// Numbers of `count` lanes; the others are zero.
F32x16 load_some(const Bf16* src, std::int64_t count) {
    if (count >= kLanes) return bf16_to_f32(src);
    Bf16 lanes[kLanes] = {};
    std::copy_n(src, count, lanes);
    return bf16_to_f32(lanes);
}

F32x16 load_some(const float* src, std::int64_t count) {
    F32x16 numbers{};
    std::memcpy(&numbers, src, sizeof(float) * std::min<std::int64_t>(count, kLanes));
    return numbers;
}

void store_some(float* dst, F32x16 numbers, std::int64_t count) {
    std::memcpy(dst, &numbers, sizeof(float) * std::min<std::int64_t>(count, kLanes));
}

void store_some(Bf16* dst, F32x16 numbers, std::int64_t count) {
    if (count >= kLanes) return store(dst, numbers);
    Bf16 lanes[kLanes];
    store(lanes, numbers);
    std::copy_n(lanes, count, dst);
}

// One call of baton_delta. Sequences and runs are those of StateRuns.
class Delta {
  public:
    explicit Delta(const DeltaArgs& args)
        : args_(args), runs_(args.runs), num_keys_(args.num_key_heads * args.key_dim),
          num_values_(args.num_value_heads * args.value_dim),
          num_channels_(2 * num_keys_ + num_values_), width_(num_channels_ + num_values_),
          num_kept_(args.conv_size - 1),
          num_slices_((args.value_dim + kSliceColumns - 1) / kSliceColumns) {}

    void run() const {
        const std::int64_t num_heads = 2 * args_.num_key_heads + args_.num_value_heads;
        each(runs_.num_sequences, num_kept_ * num_channels_,
             [this](std::int64_t sequence) { load_inputs(sequence); });
        each(runs_.num_tokens * num_heads, args_.key_dim * args_.conv_size,
             [this, num_heads](std::int64_t at) { mix(at / num_heads, at % num_heads); });
        each(runs_.num_runs, num_kept_ * num_channels_,
             [this](std::int64_t run) { store_inputs(run); });
        const std::int64_t tokens = 1 + (runs_.num_tokens - 1) / runs_.num_sequences;
        each(runs_.num_sequences * args_.num_value_heads * num_slices_,
             args_.key_dim * kSliceColumns * tokens, [this](std::int64_t at) { recur(at); });
        each(runs_.num_tokens * args_.num_value_heads, 4 * args_.value_dim,
             [this](std::int64_t at) { norm(at); });
    }

  private:
    template <typename Do>
    void each(std::int64_t total, std::int64_t unit_size, Do act) const {
        parallel_for(total, unit_size, args_.num_threads, [&](std::int64_t at, std::int64_t end) {
            for (; at < end; ++at) act(at);
        });
    }

    std::int64_t end_run(std::int64_t sequence) const {
        return sequence + 1 < runs_.num_sequences ? runs_.first_runs[sequence + 1] : runs_.num_runs;
    }
    std::int64_t first_token(std::int64_t sequence) const {
        return runs_.first_tokens[runs_.first_runs[sequence]];
    }
    // The sequence of a run or of a token, found by the first one of each sequence.
    template <typename First>
    std::int64_t find_sequence(std::int64_t wanted, First first) const {
        std::int64_t low = 0, high = runs_.num_sequences;
        while (high - low > 1) {
            const std::int64_t middle = (low + high) / 2;
            (first(middle) <= wanted ? low : high) = middle;
        }
        return low;
    }
    const std::int64_t* reads(std::int64_t run) const {
        return runs_.reads + run * runs_.num_blocks;
    }
    const std::int64_t* writes(std::int64_t run) const {
        return runs_.writes + run * runs_.num_blocks;
    }

    // Rows of the layer's part of a state, one after the other.
    struct Rows {
        const StateRows& states;
        const std::int64_t* table;
        std::int64_t block, place;

        Rows(const StateRows& states, const std::int64_t* table, std::int64_t row)
            : states(states), table(table), block(row / states.rows_per_block),
              place(row % states.rows_per_block) {}
        char* next() {
            char* const row =
                states.blocks + table[block] * states.block_bytes + place * states.row_bytes;
            if (++place == states.rows_per_block) place = 0, ++block;
            return row;
        }
    };
    Rows matrix(const std::int64_t* table, std::int64_t head) const {
        return {args_.states, table, args_.first_row + head * args_.key_dim};
    }
    Rows conv_rows(const std::int64_t* table) const { return matrix(table, args_.num_value_heads); }

    // Copies the inputs before this pass that the convolution needs.
    void load_inputs(std::int64_t sequence) const {
        auto* const dst =
            reinterpret_cast<char*>(args_.inputs_buf + sequence * num_kept_ * num_channels_);
        const std::int64_t size = num_kept_ * num_channels_ * sizeof(Bf16);
        const std::int64_t* const table = reads(runs_.first_runs[sequence]);
        if (table[0] < 0) return void(std::memset(dst, 0, size));
        Rows rows = conv_rows(table);
        for (std::int64_t at = 0; at < size; at += args_.states.row_bytes)
            std::memcpy(dst + at, rows.next(), std::min(args_.states.row_bytes, size - at));
    }

    // Channels of the token at this place of the sequence; negative places are before this pass.
    const Bf16* input(std::int64_t sequence, std::int64_t place) const {
        if (place >= 0) return args_.projected + (first_token(sequence) + place) * width_;
        return args_.inputs_buf + (sequence * num_kept_ + num_kept_ + place) * num_channels_;
    }

    // Keeps the last inputs of a run for the next one.
    void store_inputs(std::int64_t run) const {
        const std::int64_t sequence =
            find_sequence(run, [this](std::int64_t at) { return runs_.first_runs[at]; });
        const std::int64_t end =
            runs_.first_tokens[run] + runs_.num_tokens_of[run] - first_token(sequence);
        const std::int64_t row_bytes = args_.states.row_bytes;
        const std::int64_t size = num_kept_ * num_channels_ * sizeof(Bf16);
        std::vector<char> kept((size + row_bytes - 1) / row_bytes * row_bytes);
        for (std::int64_t i = 0; i < num_kept_; ++i)
            std::memcpy(kept.data() + i * num_channels_ * sizeof(Bf16),
                        input(sequence, end - num_kept_ + i), num_channels_ * sizeof(Bf16));
        Rows rows = conv_rows(writes(run));
        for (std::size_t at = 0; at < kept.size(); at += row_bytes)
            std::memcpy(rows.next(), kept.data() + at, row_bytes);
    }

    // Convolution of one head of a token, then the length of queries and keys, or the gates.
    void mix(std::int64_t token, std::int64_t head) const {
        const std::int64_t num_unit = 2 * args_.num_key_heads;
        const bool is_value = head >= num_unit;
        const std::int64_t size = is_value ? args_.value_dim : args_.key_dim;
        const std::int64_t channel =
            is_value ? 2 * num_keys_ + (head - num_unit) * size : head * size;
        float* const dst = args_.mixed_buf + token * num_channels_ + channel;
        convolve(token, channel, size, dst);
        if (is_value) return compute_gates(token, head - num_unit);
        const float scale = head < args_.num_key_heads ? 1.0f / std::sqrt(float(size)) : 1.0f;
        scale_to_length(dst, size, scale);
    }

    void convolve(std::int64_t token, std::int64_t channel, std::int64_t size, float* dst) const {
        const std::int64_t sequence =
            find_sequence(token, [this](std::int64_t at) { return first_token(at); });
        const std::int64_t first = token - first_token(sequence) - num_kept_;
        for (std::int64_t i = 0; i < size; i += kLanes) {
            F32x16 total{};
            for (std::int64_t tap = 0; tap <= num_kept_; ++tap) {
                const Bf16* const numbers = input(sequence, first + tap) + channel + i;
                const float* const weights = args_.conv + tap * num_channels_ + channel + i;
                total += load_some(weights, size - i) * load_some(numbers, size - i);
            }
            total = round_to_bf16(total);
            store_some(dst + i, round_to_bf16(multiply_sigmoid(total, total)), size - i);
        }
    }

    static void scale_to_length(float* head, std::int64_t size, float length) {
        F32x16 squares{};
        for (std::int64_t i = 0; i < size; i += kLanes) {
            const F32x16 numbers = load_some(head + i, size - i);
            squares += numbers * numbers;
        }
        const float factor = 1.0f / std::sqrt(sum(squares) + kNormEpsilon);
        for (std::int64_t i = 0; i < size; i += kLanes)
            store_some(head + i, load_some(head + i, size - i) * factor * length, size - i);
    }

    // Decay and write strength of a head.
    void compute_gates(std::int64_t token, std::int64_t head) const {
        const Bf16* const gates = args_.gates + token * 2 * args_.num_value_heads;
        float* const dst = args_.gates_buf + (token * args_.num_value_heads + head) * 2;
        const float x = bf16_to_f32(gates[args_.num_value_heads + head]) + args_.decay_bias[head];
        const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
        dst[0] = std::exp(-args_.decay_rate[head] * softplus);
        dst[1] = round_to_bf16(1.0f / (1.0f + std::exp(-bf16_to_f32(gates[head]))));
    }

    // A token of one head, with a slice of its value and of its output.
    struct Token {
        const float *query, *key;
        float decay, strength, key_query;
        const float* value;
        Bf16* output;
    };

    Token token_at(std::int64_t token, std::int64_t head, std::int64_t column) const {
        const std::int64_t key_head = head / (args_.num_value_heads / args_.num_key_heads);
        const std::int64_t at = head * args_.value_dim + column;
        const float* const mixed = args_.mixed_buf + token * num_channels_;
        const float* const gates = args_.gates_buf + (token * args_.num_value_heads + head) * 2;
        const float* const query = mixed + key_head * args_.key_dim;
        const float* const key = query + num_keys_;
        F32x16 products{};
        for (std::int64_t i = 0; i < args_.key_dim; i += kLanes)
            products +=
                load_some(query + i, args_.key_dim - i) * load_some(key + i, args_.key_dim - i);
        return {query,
                key,
                gates[0],
                gates[1],
                sum(products),
                mixed + 2 * num_keys_ + at,
                args_.dst + token * num_values_ + at};
    }

    // A slice of a head's state in all runs of a sequence.
    void recur(std::int64_t at) const {
        const std::int64_t column = at % num_slices_ * kSliceColumns;
        const std::int64_t head = at / num_slices_ % args_.num_value_heads;
        const std::int64_t sequence = at / num_slices_ / args_.num_value_heads;
        const std::int64_t count = std::min<std::int64_t>(kSliceColumns, args_.value_dim - column);
        // Aligned to cache lines, so that no register of it straddles two.
        static thread_local std::vector<CacheLine> lines;
        lines.resize(args_.key_dim * kSliceColumns * sizeof(float) / sizeof(CacheLine) + 1);
        auto* const slice = reinterpret_cast<float*>(lines.data());
        std::int64_t run = runs_.first_runs[sequence];
        load_slice(slice, reads(run), head, column, count);
        for (; run < end_run(sequence); ++run) {
            for (std::int64_t i = 0; i < runs_.num_tokens_of[run]; ++i) {
                const std::int64_t token = runs_.first_tokens[run] + i;
                apply(slice, token_at(token, head, column), count);
            }
            store_slice(slice, writes(run), head, column, count);
        }
    }

    void load_slice(float* slice, const std::int64_t* table, std::int64_t head, std::int64_t column,
                    std::int64_t count) const {
        const std::int64_t size = args_.key_dim * kSliceColumns;
        if (table[0] < 0 || count < kSliceColumns) std::memset(slice, 0, sizeof(float) * size);
        if (table[0] < 0) return;
        Rows rows = matrix(table, head);
        for (std::int64_t i = 0; i < args_.key_dim; ++i) {
            const float* const row = reinterpret_cast<const float*>(rows.next()) + column;
            copy_columns(slice + i * kSliceColumns, row, count);
        }
    }

    void store_slice(const float* slice, const std::int64_t* table, std::int64_t head,
                     std::int64_t column, std::int64_t count) const {
        Rows rows = matrix(table, head);
        for (std::int64_t i = 0; i < args_.key_dim; ++i) {
            float* const row = reinterpret_cast<float*>(rows.next()) + column;
            copy_columns(row, slice + i * kSliceColumns, count);
        }
    }

    static void copy_columns(float* dst, const float* src, std::int64_t count) {
        if (count == kSliceColumns)
            std::memcpy(dst, src, sizeof(float) * kSliceColumns);
        else
            std::memcpy(dst, src, sizeof(float) * count);
    }

    // Computes one token. Each sum has one product per term, so that compilers can fuse it in one
    // way only.
    void apply(float* slice, const Token& token, std::int64_t count) const {
        RegSlice recalled{}, output{}, value{};
        for (std::int64_t i = 0; i < args_.key_dim; ++i) {
            F32Reg* const row = reinterpret_cast<F32Reg*>(slice + i * kSliceColumns);
            for (int r = 0; r < kSliceRegs; ++r) {
                const F32Reg decayed = row[r] * token.decay;
                recalled[r] += decayed * token.key[i];
                output[r] += decayed * token.query[i];
                row[r] = decayed;
            }
        }
        std::memcpy(value, token.value, sizeof(float) * count);
        for (int r = 0; r < kSliceRegs; ++r) {
            value[r] = (value[r] - recalled[r]) * token.strength;
            output[r] += value[r] * token.key_query;
        }
        for (std::int64_t i = 0; i < args_.key_dim; ++i) {
            F32Reg* const row = reinterpret_cast<F32Reg*>(slice + i * kSliceColumns);
            for (int r = 0; r < kSliceRegs; ++r) row[r] += value[r] * token.key[i];
        }
        const auto* const numbers = reinterpret_cast<const float*>(output);
        for (std::int64_t i = 0; i < count; i += kLanes)
            store_some(token.output + i, load_some(numbers + i, count - i), count - i);
    }

    // RMS norm of a head's output, times SiLU of its gate.
    void norm(std::int64_t at) const {
        const std::int64_t token = at / args_.num_value_heads, head = at % args_.num_value_heads;
        const std::int64_t size = args_.value_dim;
        Bf16* const dst = args_.dst + token * num_values_ + head * size;
        const Bf16* const gates = args_.projected + token * width_ + num_channels_ + head * size;
        const auto* const weights = static_cast<const Bf16*>(args_.norm.weight);
        F32x16 squares{};
        for (std::int64_t i = 0; i < size; i += kLanes) {
            const F32x16 numbers = load_some(dst + i, size - i);
            squares += numbers * numbers;
        }
        const float factor = 1.0f / std::sqrt(sum(squares) / float(size) + args_.norm.epsilon);
        for (std::int64_t i = 0; i < size; i += kLanes) {
            const std::int64_t count = size - i;
            const F32x16 normed = round_to_bf16(load_some(dst + i, count) * factor);
            const F32x16 weighted = round_to_bf16(normed * load_some(weights + i, count));
            const F32x16 gate = load_some(gates + i, count);
            store_some(dst + i, weighted * multiply_sigmoid(gate, gate), count);
        }
    }

    const DeltaArgs& args_;
    const StateRuns& runs_;
    const std::int64_t num_keys_, num_values_, num_channels_, width_, num_kept_, num_slices_;
};

}  // namespace

extern "C" {

void baton_delta(const DeltaArgs* args) { Delta(*args).run(); }

void baton_multiply_sigmoid(const SigmoidArgs* args) {
    const std::int64_t size = args->size;
    const auto multiply = [=](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row) {
            Bf16* const dst = args->dst + row * size;
            const Bf16* const gates = args->gates + row * args->gate_stride;
            for (std::int64_t i = 0; i < size; i += kLanes) {
                const F32x16 gate = args->has_one_gate ? splat(bf16_to_f32(gates[0]))
                                                       : load_some(gates + i, size - i);
                const F32x16 factor = round_to_bf16(multiply_sigmoid(splat(1.0f), gate));
                store_some(dst + i, load_some(dst + i, size - i) * factor, size - i);
            }
        }
    };
    parallel_for(args->num_rows, size, args->num_threads, multiply);
}

}  // extern "C"
