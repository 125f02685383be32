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
        compute_states([this](auto... at) { mix(at...); }, [this](auto... at) { apply(at...); });
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
        convolve(token, channel, size, mixed(token, channel, size), args_.conv_bias);
        if (is_value) compute_gates(token, value_head);
    }

    void compute_gates(std::int64_t token, std::int64_t head) const {
        const Bf16* const src = args_.gates + token * args_.num_value_heads;
        const float x = bf16_to_f32(src[head]) + args_.step_bias[head];
        const float step = x > 20.0f ? x : std::log1p(std::exp(x));
        float* const dst = gates(token, head);
        dst[0] = std::exp(-args_.decay_rate[head] * step);
        dst[1] = step;
    }

    // Computes one token with a slice of a head's state.
    void apply(float* slice, std::int64_t token, std::int64_t head, std::int64_t column) const {
        // Locals, because stores into the slice could change what is in memory. There is one copy
        // of this loop, so that compilers fuse its products in one way only.
        const std::int64_t key_dim = args_.key_dim, value_dim = args_.value_dim;
        const std::int64_t left = value_dim - column;
        const std::int64_t key_head = head / (args_.num_value_heads / args_.num_key_heads);
        const float* const query = mixed(token, key_head * key_dim, key_dim);
        const float* const key = mixed(token, num_keys_ + key_head * key_dim, key_dim);
        const float decay = gates(token, head)[0], step = gates(token, head)[1];
        const float skip = args_.skip[head];
        RegSlice value{}, written, output{};
        copy_columns(reinterpret_cast<float*>(value),
                     mixed(token, 2 * num_keys_ + head * value_dim, value_dim) + column, left);
        for (int r = 0; r < kSliceRegs; ++r) written[r] = value[r] * step;
        for (std::int64_t i = 0; i < key_dim; ++i) {
            F32Reg* const row = reinterpret_cast<F32Reg*>(slice + i * kSliceColumns);
            const float key_number = key[i], query_number = query[i];
            for (int r = 0; r < kSliceRegs; ++r) {
                const F32Reg state = row[r] * decay + written[r] * key_number;
                output[r] += state * query_number;
                row[r] = state;
            }
        }
        for (int r = 0; r < kSliceRegs; ++r) output[r] += value[r] * skip;
        copy_columns(args_.outputs_buf + token * num_values_ + head * value_dim + column,
                     reinterpret_cast<const float*>(output), left);
    }

    // Gates of a group of heads, then the RMS norm of the group, if there is one.
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
            const F32x16 gated = load_some(numbers + i, size - i);
            if (args_.norm.weight == nullptr) {
                store_some(dst + i, gated, size - i);
                continue;
            }
            const F32x16 normed = gated * factor;
            store_some(dst + i, normed * load_some(weights + i, size - i), size - i);
        }
    }
};

}  // namespace

extern "C" {

void baton_mamba(const MambaArgs* args) { Mamba(*args).run(); }

}  // extern "C"
