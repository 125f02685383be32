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
        compute_states(
            [this](auto... at) { mix(at...); },
            [this](auto... at) { args_.decays_channels ? apply_by_channel(at...) : apply(at...); });
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
        float* const dst = mixed(token, channel, size);
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

    std::int64_t num_decays() const { return args_.decays_channels ? args_.key_dim : 1; }

    // Decays of a head, then its write strength.
    float* factors(std::int64_t token, std::int64_t head) const {
        return args_.gates_buf + (head * runs_.num_tokens + token) * (num_decays() + 1);
    }

    void compute_gates(std::int64_t token, std::int64_t head) const {
        const std::int64_t num_heads = args_.num_value_heads, count = num_decays();
        const Bf16* const src = args_.gates + token * num_heads * (1 + count);
        float* const dst = factors(token, head);
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t at = head * count + i;
            const float x = bf16_to_f32(src[num_heads + at]) + args_.decay_bias[at];
            const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
            dst[i] = std::exp(-args_.decay_rate[head] * softplus);
        }
        dst[count] = args_.strength_scale / (1.0f + std::exp(-bf16_to_f32(src[head])));
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
        const float decay = factors(token, head)[0], strength = factors(token, head)[1];
        RegSlice recalled{}, output{}, value{};
        for (std::int64_t i = 0; i < key_dim; ++i) {
            const float* const row = slice + i * kSliceColumns;
            for (int r = 0; r < kSliceRegs; ++r) {
                const F32Reg state = load_reg(row + r * kRegLanes);
                recalled[r] += state * key[i];
                output[r] += state * query[i];
            }
        }
        copy_columns(reinterpret_cast<float*>(value),
                     mixed(token, 2 * num_keys_ + head * value_dim, value_dim) + column, left);
        const float key_query = dot(key, query, key_dim);
        for (int r = 0; r < kSliceRegs; ++r) {
            value[r] = (value[r] - recalled[r] * decay) * strength;
            output[r] = output[r] * decay + value[r] * key_query;
        }
        for (std::int64_t i = 0; i < key_dim; ++i) {
            float* const row = slice + i * kSliceColumns;
            const float key_number = key[i];
            for (int r = 0; r < kSliceRegs; ++r) {
                const F32Reg state = load_reg(row + r * kRegLanes);
                store_reg(row + r * kRegLanes, state * decay + value[r] * key_number);
            }
        }
        copy_columns(args_.outputs_buf + token * num_values_ + head * value_dim + column,
                     reinterpret_cast<const float*>(output), left);
    }

    // The same with a decay of each key channel.
    void apply_by_channel(float* slice, std::int64_t token, std::int64_t head,
                          std::int64_t column) const {
        const std::int64_t key_dim = args_.key_dim, value_dim = args_.value_dim;
        const std::int64_t left = value_dim - column;
        const std::int64_t key_head = head / (args_.num_value_heads / args_.num_key_heads);
        const float* const query = mixed(token, key_head * key_dim, key_dim);
        const float* const key = mixed(token, num_keys_ + key_head * key_dim, key_dim);
        const float* const decays = factors(token, head);
        const float strength = decays[key_dim];
        RegSlice recalled{}, output{}, value{};
        for (std::int64_t i = 0; i < key_dim; ++i) {
            float* const row = slice + i * kSliceColumns;
            const float decay = decays[i], key_number = key[i], query_number = query[i];
            for (int r = 0; r < kSliceRegs; ++r) {
                const F32Reg state = load_reg(row + r * kRegLanes) * decay;
                store_reg(row + r * kRegLanes, state);
                recalled[r] += state * key_number;
                output[r] += state * query_number;
            }
        }
        copy_columns(reinterpret_cast<float*>(value),
                     mixed(token, 2 * num_keys_ + head * value_dim, value_dim) + column, left);
        const float key_query = dot(key, query, key_dim);
        for (int r = 0; r < kSliceRegs; ++r) {
            value[r] = (value[r] - recalled[r]) * strength;
            output[r] += value[r] * key_query;
        }
        for (std::int64_t i = 0; i < key_dim; ++i) {
            float* const row = slice + i * kSliceColumns;
            const float key_number = key[i];
            for (int r = 0; r < kSliceRegs; ++r)
                store_reg(row + r * kRegLanes,
                          load_reg(row + r * kRegLanes) + value[r] * key_number);
        }
        copy_columns(args_.outputs_buf + token * num_values_ + head * value_dim + column,
                     reinterpret_cast<const float*>(output), left);
    }

    static float dot(const float* a, const float* b, std::int64_t size) {
        F32x16 products{};
        for (std::int64_t i = 0; i < size; i += kLanes)
            products += load_some(a + i, size - i) * load_some(b + i, size - i);
        return sum(products);
    }

    // RMS norm of a head's output, times SiLU or sigmoid of its gate.
    void norm(std::int64_t at) const {
        const std::int64_t token = at / args_.num_value_heads, head = at % args_.num_value_heads;
        const std::int64_t size = args_.value_dim;
        const float* const numbers = args_.outputs_buf + token * num_values_ + head * size;
        Bf16* const dst = args_.dst + token * num_values_ + head * size;
        const Bf16* const gates = args_.projected + token * width_ + num_channels_ + head * size;
        const auto* const weights = static_cast<const Bf16*>(args_.norm.weight);
        F32x16 squares{};
        for (std::int64_t i = 0; i < size; i += kLanes) {
            const F32x16 some = load_some(numbers + i, size - i);
            squares += some * some;
        }
        const float factor = 1.0f / std::sqrt(sum(squares) / float(size) + args_.norm.epsilon);
        for (std::int64_t i = 0; i < size; i += kLanes) {
            const std::int64_t count = size - i;
            const F32x16 normed = load_some(numbers + i, count) * factor;
            const F32x16 weighted = normed * load_some(weights + i, count);
            const F32x16 gate = load_some(gates + i, count);
            const F32x16 factor_of_gate = args_.decays_channels ? splat(1.0f) : gate;
            store_some(dst + i, weighted * multiply_sigmoid(factor_of_gate, gate), count);
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
