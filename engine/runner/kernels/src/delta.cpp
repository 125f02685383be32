// Linear attention by the gated delta rule, in recurrent form: one token after the other, with a
// fixed order of additions. So the bits of a token do not depend on the chunks of its sequence.

#include "recurrent.h"

using namespace baton;

namespace {

constexpr float kNormEpsilon = 1e-6f;  // of queries and keys

// One call of baton_delta. Sequences and runs are those of StateRuns.
class Delta : RecurrentPass<DeltaArgs> {
  public:
    using RecurrentPass::RecurrentPass;

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
