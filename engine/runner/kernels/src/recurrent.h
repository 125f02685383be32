// Common parts of recurrent layers: their states, the inputs of their convolutions, and the
// convolution.
#pragma once

#include "gate.h"
#include "thread_pool.h"

#include <algorithm>
#include <vector>

namespace baton {

constexpr int kSliceRegs = 4;
constexpr int kSliceColumns = kSliceRegs * kRegLanes;  // of a state, kept in the L1 cache
using RegSlice = F32Reg[kSliceRegs];

struct alignas(64) CacheLine {
    char bytes[64];
};

// Through pointers: compilers copy a register by memcpy in halves, through memory.
inline F32Reg load_reg(const float* src) { return *reinterpret_cast<const F32Reg*>(src); }

inline F32Reg load_reg(const Bf16* src) {
    const U16Reg halves = *reinterpret_cast<const U16Reg*>(src);
    return (F32Reg)(__builtin_convertvector(halves, U32Reg) << 16);
}

inline void store_reg(float* dst, F32Reg numbers) { *reinterpret_cast<F32Reg*>(dst) = numbers; }

// Numbers of `count` lanes; the others are zero.
inline F32x16 load_some(const Bf16* src, std::int64_t count) {
    if (count >= kLanes) {
        F32x16 numbers;
        for_each_reg([&](int i) { reg(numbers, i) = load_reg(src + i * kRegLanes); });
        return numbers;
    }
    Bf16 lanes[kLanes] = {};
    std::copy_n(src, count, lanes);
    return bf16_to_f32(lanes);
}

inline F32x16 load_some(const float* src, std::int64_t count) {
    F32x16 numbers{};
    if (count >= kLanes) {
        for_each_reg([&](int i) { reg(numbers, i) = load_reg(src + i * kRegLanes); });
        return numbers;
    }
    std::memcpy(&numbers, src, sizeof(float) * count);
    return numbers;
}

inline void store_some(float* dst, F32x16 numbers, std::int64_t count) {
    if (count >= kLanes)
        return for_each_reg([&](int i) { store_reg(dst + i * kRegLanes, reg(numbers, i)); });
    std::memcpy(dst, &numbers, sizeof(float) * count);
}

inline void store_some(Bf16* dst, F32x16 numbers, std::int64_t count) {
    if (count >= kLanes) return store(dst, numbers);
    Bf16 lanes[kLanes];
    store(lanes, numbers);
    std::copy_n(lanes, count, dst);
}

// One call for a layer. Sequences and runs are those of StateRuns.
template <typename Args>
class RecurrentPass {
  public:
    explicit RecurrentPass(const Args& args)
        : args_(args), runs_(args.runs), num_keys_(args.num_key_heads * args.key_dim),
          num_values_(args.num_value_heads * args.value_dim),
          num_channels_(2 * num_keys_ + num_values_), width_(num_channels_ + num_values_),
          num_kept_(args.conv_size - 1),
          num_slices_((args.value_dim + kSliceColumns - 1) / kSliceColumns) {}

  protected:
    template <typename Do>
    void each(std::int64_t total, std::int64_t unit_size, Do act) const {
        parallel_for(total, unit_size, args_.num_threads, [&](std::int64_t at, std::int64_t end) {
            for (; at < end; ++at) act(at);
        });
    }

    // Computes all but the norms. `mix` convolves a head of a token, and `apply` computes a token
    // with a slice of a head's state.
    template <typename Mix, typename Apply>
    void compute_states(Mix mix, Apply apply) const {
        const std::int64_t num_heads = 2 * args_.num_key_heads + args_.num_value_heads;
        const std::int64_t tokens = 1 + (runs_.num_tokens - 1) / runs_.num_sequences;
        each(runs_.num_sequences, num_kept_ * num_channels_,
             [this](std::int64_t sequence) { load_inputs(sequence); });
        each(runs_.num_tokens * num_heads, args_.key_dim * args_.conv_size,
             [&](std::int64_t at) { mix(at / num_heads, at % num_heads); });
        each(runs_.num_runs, num_kept_ * num_channels_,
             [this](std::int64_t run) { store_inputs(run); });
        each(runs_.num_sequences * args_.num_value_heads, args_.key_dim * args_.value_dim * tokens,
             [&](std::int64_t at) { recur(at, apply); });
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

    static void add_products(float* dst, const float* weights, const Bf16* numbers,
                             std::int64_t size, bool is_first) {
        if (is_first) std::memset(dst, 0, sizeof(float) * size);
        std::int64_t i = 0;
        for (; i + kRegLanes <= size; i += kRegLanes)
            store_reg(dst + i, load_reg(dst + i) + load_reg(weights + i) * load_reg(numbers + i));
        for (; i < size; ++i) dst[i] += weights[i] * bf16_to_f32(numbers[i]);
    }

    // Convolution of some channels of a token.
    void add_taps(std::int64_t token, std::int64_t channel, std::int64_t size, float* dst) const {
        const std::int64_t sequence =
            find_sequence(token, [this](std::int64_t at) { return first_token(at); });
        const std::int64_t first = token - first_token(sequence) - num_kept_;
        for (std::int64_t tap = 0; tap <= num_kept_; ++tap) {
            const Bf16* const numbers = input(sequence, first + tap) + channel;
            const float* const weights = args_.conv + tap * num_channels_ + channel;
            add_products(dst, weights, numbers, size, tap == 0);
        }
    }

    // SiLU of the convolution of some channels of a token.
    void convolve(std::int64_t token, std::int64_t channel, std::int64_t size, float* dst,
                  const float* bias = nullptr) const {
        add_taps(token, channel, size, dst);
        for (std::int64_t i = 0; i < size; i += kLanes) {
            F32x16 total = load_some(dst + i, size - i);
            if (bias) total += load_some(bias + channel + i, size - i);
            store_some(dst + i, multiply_sigmoid(total, total), size - i);
        }
    }

    // Numbers of a head of `size` channels: by head, then by token, so that a head's are
    // neighbours.
    float* mixed(std::int64_t token, std::int64_t channel, std::int64_t size) const {
        return args_.mixed_buf + channel * runs_.num_tokens + token * size;
    }
    float* gates(std::int64_t token, std::int64_t head) const {
        return args_.gates_buf + (head * runs_.num_tokens + token) * 2;
    }

    // A head's state in all runs of a sequence. It is kept slice by slice, but read and written in
    // whole rows, which are neighbours in memory.
    // `apply` computes a token with a slice.
    template <typename Apply>
    void recur(std::int64_t at, Apply apply) const {
        const std::int64_t sequence = at / args_.num_value_heads, head = at % args_.num_value_heads;
        // Aligned to cache lines, so that no register of it straddles two.
        static thread_local std::vector<CacheLine> lines;
        const std::int64_t size = args_.key_dim * kSliceColumns;
        lines.resize(num_slices_ * size * sizeof(float) / sizeof(CacheLine) + 1);
        auto* const slices = reinterpret_cast<float*>(lines.data());
        std::int64_t run = runs_.first_runs[sequence];
        load_state(slices, reads(run), head);
        for (; run < end_run(sequence); ++run) {
            for (std::int64_t i = 0; i < num_slices_; ++i)
                for (std::int64_t token = 0; token < runs_.num_tokens_of[run]; ++token)
                    apply(slices + i * size, runs_.first_tokens[run] + token, head,
                          i * kSliceColumns);
            store_state(slices, writes(run), head);
        }
    }

    void load_state(float* slices, const std::int64_t* table, std::int64_t head) const {
        const std::int64_t size = args_.key_dim * kSliceColumns;
        // Columns after the last one, too.
        if (table[0] < 0 || args_.value_dim % kSliceColumns)
            std::memset(slices, 0, sizeof(float) * num_slices_ * size);
        if (table[0] < 0) return;
        Rows rows = matrix(table, head);
        for (std::int64_t i = 0; i < args_.key_dim; ++i) {
            const auto* const row = reinterpret_cast<const float*>(rows.next());
            for (std::int64_t column = 0; column < args_.value_dim; column += kSliceColumns)
                copy_columns(slices + column * args_.key_dim + i * kSliceColumns, row + column,
                             args_.value_dim - column);
        }
    }

    void store_state(const float* slices, const std::int64_t* table, std::int64_t head) const {
        Rows rows = matrix(table, head);
        for (std::int64_t i = 0; i < args_.key_dim; ++i) {
            auto* const row = reinterpret_cast<float*>(rows.next());
            for (std::int64_t column = 0; column < args_.value_dim; column += kSliceColumns)
                copy_columns(row + column, slices + column * args_.key_dim + i * kSliceColumns,
                             args_.value_dim - column);
        }
    }

    // Copies columns of a slice, of which `left` are in the state.
    static void copy_columns(float* dst, const float* src, std::int64_t left) {
        std::int64_t i = 0;
        for (; i + kRegLanes <= std::min<std::int64_t>(left, kSliceColumns); i += kRegLanes)
            store_reg(dst + i, load_reg(src + i));
        for (; i < std::min<std::int64_t>(left, kSliceColumns); ++i) dst[i] = src[i];
    }

    const Args& args_;
    const StateRuns& runs_;
    const std::int64_t num_keys_, num_values_, num_channels_, width_, num_kept_, num_slices_;
};

}  // namespace baton
