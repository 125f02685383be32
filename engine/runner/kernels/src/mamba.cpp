// Mamba2 layers in recurrent form: one token after the other, with a fixed order of additions. So
// the bits of a token do not depend on the chunks of its sequence.

#include "recurrent.h"

using namespace baton;

namespace {

// One call of baton_mamba. Sequences and runs are those of StateRuns.
class Mamba : RecurrentPass<MambaArgs> {
  public:
    using RecurrentPass::RecurrentPass;

    void run() const {
        const std::int64_t num_heads = 2 * args_.num_key_heads + args_.num_value_heads;
        each(runs_.num_sequences, num_kept_ * num_channels_,
             [this](std::int64_t sequence) { load_inputs(sequence); });
        each(runs_.num_tokens * num_heads, args_.value_dim * args_.conv_size,
             [this, num_heads](std::int64_t at) { mix(at / num_heads, at % num_heads); });
        each(runs_.num_runs, num_kept_ * num_channels_,
             [this](std::int64_t run) { store_inputs(run); });
        const std::int64_t tokens = 1 + (runs_.num_tokens - 1) / runs_.num_sequences;
        each(runs_.num_sequences * args_.num_value_heads * num_slices_,
             args_.key_dim * kSliceColumns * tokens, [this](std::int64_t at) { recur(at); });
        each(runs_.num_tokens * args_.num_key_heads, 4 * num_values_ / args_.num_key_heads,
             [this](std::int64_t at) { norm(at); });
    }

  private:
    // Convolution of one head of a token; with a value head also its decay and step.
    void mix(std::int64_t token, std::int64_t head) const {
        const std::int64_t value_head = head - 2 * args_.num_key_heads;
        const bool is_value = value_head >= 0;
        const std::int64_t size = is_value ? args_.value_dim : args_.key_dim;
        const std::int64_t channel =
            is_value ? 2 * num_keys_ + value_head * size : head * args_.key_dim;
        convolve(token, channel, size, args_.mixed_buf + token * num_channels_ + channel,
                 args_.conv_bias);
        if (is_value) compute_gates(token, value_head);
    }

    void compute_gates(std::int64_t token, std::int64_t head) const {
        const std::int64_t at = token * args_.num_value_heads + head;
        const float x = bf16_to_f32(args_.gates[at]) + args_.step_bias[head];
        const float step = x > 20.0f ? x : std::log1p(std::exp(x));
        args_.gates_buf[2 * at] = std::exp(-args_.decay_rate[head] * step);
        args_.gates_buf[2 * at + 1] = step;
    }

    // A token of one head, with a slice of its value and of its output.
    struct Token {
        const float *query, *key;
        float decay, step;
        const float* value;
        float* output;
    };

    Token token_at(std::int64_t token, std::int64_t head, std::int64_t column) const {
        const std::int64_t key_head = head / (args_.num_value_heads / args_.num_key_heads);
        const std::int64_t at = head * args_.value_dim + column;
        const float* const mixed = args_.mixed_buf + token * num_channels_;
        const float* const gates = args_.gates_buf + (token * args_.num_value_heads + head) * 2;
        const float* const query = mixed + key_head * args_.key_dim;
        return {query,    query + num_keys_,          gates[0],
                gates[1], mixed + 2 * num_keys_ + at, args_.outputs_buf + token * num_values_ + at};
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
                apply(slice, token_at(token, head, column), args_.skip[head], count);
            }
            store_slice(slice, writes(run), head, column, count);
        }
    }

    // Computes one token.
    void apply(float* slice, const Token& token, float skip, std::int64_t count) const {
        RegSlice value{}, written, output{};
        std::memcpy(value, token.value, sizeof(float) * count);
        for (int r = 0; r < kSliceRegs; ++r) written[r] = value[r] * token.step;
        for (std::int64_t i = 0; i < args_.key_dim; ++i) {
            F32Reg* const row = reinterpret_cast<F32Reg*>(slice + i * kSliceColumns);
            for (int r = 0; r < kSliceRegs; ++r) {
                row[r] = row[r] * token.decay + written[r] * token.key[i];
                output[r] += row[r] * token.query[i];
            }
        }
        for (int r = 0; r < kSliceRegs; ++r) output[r] += value[r] * skip;
        std::memcpy(token.output, output, sizeof(float) * count);
    }

    // Gates of a group of heads, then the RMS norm of the group.
    void norm(std::int64_t at) const {
        const std::int64_t token = at / args_.num_key_heads, group = at % args_.num_key_heads;
        const std::int64_t size = num_values_ / args_.num_key_heads, first = group * size;
        float* const numbers = args_.outputs_buf + token * num_values_ + first;
        const Bf16* const gates = args_.projected + token * width_ + num_channels_ + first;
        const Bf16* const weights = static_cast<const Bf16*>(args_.norm.weight) + first;
        Bf16* const dst = args_.dst + token * num_values_ + first;
        F32x16 squares{};
        for (std::int64_t i = 0; i < size; i += kLanes) {
            const F32x16 gate = load_some(gates + i, size - i);
            const F32x16 gated = load_some(numbers + i, size - i) * multiply_sigmoid(gate, gate);
            store_some(numbers + i, gated, size - i);
            squares += gated * gated;
        }
        const float factor = 1.0f / std::sqrt(sum(squares) / float(size) + args_.norm.epsilon);
        for (std::int64_t i = 0; i < size; i += kLanes) {
            const F32x16 normed = load_some(numbers + i, size - i) * factor;
            store_some(dst + i, normed * load_some(weights + i, size - i), size - i);
        }
    }
};

}  // namespace

extern "C" {

void baton_mamba(const MambaArgs* args) { Mamba(*args).run(); }

}  // extern "C"
