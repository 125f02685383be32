// Norms, GELU, RoPE, gates, argmax and add: the operations between GEMMs. Each rounds where torch
// does.

#include "gate.h"
#include "thread_pool.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

using namespace baton;

namespace {

float sum_of_squares(const Bf16* row, std::int64_t size) {
    F32x16 squares{};
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        F32x16 numbers = bf16_to_f32(row + i);
        for_each_reg([&](int r) { reg(squares, r) += reg(numbers, r) * reg(numbers, r); });
    }
    float total = sum(squares);
    for (; i < size; ++i) total += bf16_to_f32(row[i]) * bf16_to_f32(row[i]);
    return total;
}

float mean_square(const Bf16* row, std::int64_t size) {
    return sum_of_squares(row, size) / float(size);
}

// Mean square of each row over the numbers of all ranks; empty if one has all.
std::vector<float> means_of_ranks(const RmsNormArgs& args) {
    RankLinks* const ranks = args.norm.ranks;
    if (ranks == nullptr) return {};
    std::vector<float> means(args.num_rows);
    for (std::int64_t row = 0; row < args.num_rows; ++row)
        means[row] = mean_square(args.src + row * args.src_stride, args.size);
    baton_all_reduce(ranks, means.data(), args.num_rows, 1, args.num_threads);
    for (float& mean : means) mean /= float(ranks->size);
    return means;
}

// Weights of an RMS norm. bf16 weights multiply rounded numbers.
struct Bf16Weights {
    const Bf16* weights;

    F32x16 apply(F32x16 numbers, std::int64_t at) const {
        return round_to_bf16(numbers) * bf16_to_f32(weights + at);
    }
    float apply(float number, std::int64_t at) const {
        return round_to_bf16(number) * bf16_to_f32(weights[at]);
    }
};

struct F32Weights {
    const float* weights;

    F32x16 apply(F32x16 numbers, std::int64_t at) const {
        F32x16 factors;
        std::memcpy(&factors, weights + at, sizeof factors);
        return numbers * factors;
    }
    float apply(float number, std::int64_t at) const { return number * weights[at]; }
};

struct NoWeights {};

// Calls `each` with the weights of a norm.
template <typename Each>
void with_weights(const NormParams& norm, Each each) {
    if (norm.is_float32)
        each(F32Weights{static_cast<const float*>(norm.weight)});
    else
        each(Bf16Weights{static_cast<const Bf16*>(norm.weight)});
}

template <typename Weights>
void norm_row(const Bf16* row, Weights weights, Bf16* dst, std::int64_t size, float mean,
              float epsilon) {
    const float factor = 1.0f / std::sqrt(mean + epsilon);
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        store(dst + i, weights.apply(bf16_to_f32(row + i) * factor, i));
    for (; i < size; ++i) dst[i] = f32_to_bf16(weights.apply(bf16_to_f32(row[i]) * factor, i));
}

F32x16 load_f32(const float* numbers) {
    F32x16 loaded;
    std::memcpy(&loaded, numbers, sizeof loaded);
    return loaded;
}

// Layer norm of a row of whole vectors.
void layer_norm_row(const LayerNormF32& norm, const Bf16* row, Bf16* dst, std::int64_t size) {
    const auto average = [=](auto of) {
        F32x16 total{};
        for (std::int64_t i = 0; i < size; i += kLanes) total += of(bf16_to_f32(row + i));
        return sum(total) / float(size);
    };
    const float mean = average([](F32x16 numbers) { return numbers; });
    const float variance = average([=](F32x16 numbers) {
        const F32x16 rest = numbers - mean;
        return rest * rest;
    });
    const float factor = 1.0f / std::sqrt(variance + norm.epsilon);
    for (std::int64_t i = 0; i < size; i += kLanes) {
        F32x16 numbers = (bf16_to_f32(row + i) - mean) * factor * load_f32(norm.weight + i);
        if (norm.bias) numbers += load_f32(norm.bias + i);
        store(dst + i, numbers);
    }
}

// RoPE of up to kLanes heads of a token, after an RMS norm of each.
template <typename Weights>
struct Rope {
    Weights weights;
    const Bf16 *cosines, *sines;
    std::int64_t size;

    // Computes all norms together: one by one, each would wait for a square root and two divisions.
    void operator()(const Bf16* heads, Bf16* dst, int count, float epsilon) const {
        F32x16 lengths{};
        for (int head = 0; kHasNorm && head < count; ++head)
            lengths[head] = sum_of_squares(heads + head * size, size);
        const F32x16 factors = kHasNorm ? rsqrt(lengths / float(size) + epsilon) : lengths;
        for (int head = 0; head < count; ++head)
            rotate_head(heads + head * size, dst + head * size, factors[head]);
    }

  private:
    static constexpr bool kHasNorm = !std::is_same_v<Weights, NoWeights>;

    void rotate_head(const Bf16* head, Bf16* dst, float factor) const {
        const std::int64_t half = size / 2;
        std::int64_t i = 0;
        for (; i + kLanes <= half; i += kLanes) {
            const std::int64_t later = i + half;
            const F32x16 first = load(head, i, factor), second = load(head, later, factor);
            store(dst + i, round_to_bf16(first * bf16_to_f32(cosines + i)) +
                               round_to_bf16(-second * bf16_to_f32(sines + i)));
            store(dst + later, round_to_bf16(second * bf16_to_f32(cosines + later)) +
                                   round_to_bf16(first * bf16_to_f32(sines + later)));
        }
        for (; i < half; ++i) {
            const std::int64_t later = i + half;
            const float first = load_one(head, i, factor), second = load_one(head, later, factor);
            dst[i] = f32_to_bf16(round_to_bf16(first * bf16_to_f32(cosines[i])) +
                                 round_to_bf16(-second * bf16_to_f32(sines[i])));
            dst[later] = f32_to_bf16(round_to_bf16(second * bf16_to_f32(cosines[later])) +
                                     round_to_bf16(first * bf16_to_f32(sines[later])));
        }
    }

    F32x16 load(const Bf16* head, std::int64_t at, float factor) const {
        const F32x16 numbers = bf16_to_f32(head + at);
        if constexpr (kHasNorm)
            return round_to_bf16(weights.apply(numbers * factor, at));
        else
            return numbers;
    }
    float load_one(const Bf16* head, std::int64_t at, float factor) const {
        const float number = bf16_to_f32(head[at]);
        if constexpr (kHasNorm)
            return round_to_bf16(weights.apply(number * factor, at));
        else
            return number;
    }
};

template <typename Weights>
void rotate(const RopeArgs& args, Weights weights) {
    const std::int64_t num_heads = args.num_heads, head_dim = args.head_dim;
    const auto rotate_tokens = [=, &args](std::int64_t token, std::int64_t end) {
        for (; token < end; ++token) {
            const Rope<Weights> rope{weights, args.angles.cosines + token * head_dim,
                                     args.angles.sines + token * head_dim, head_dim};
            for (std::int64_t head = 0; head < num_heads; head += kLanes)
                rope(args.src + token * args.src_stride + head * head_dim,
                     args.dst + (token * num_heads + head) * head_dim,
                     int(std::min<std::int64_t>(num_heads - head, kLanes)), args.norm.epsilon);
        }
    };
    parallel_for(args.num_tokens, num_heads * head_dim, args.num_threads, rotate_tokens);
}

// dst += scale(src)
template <typename Scale>
void add(Bf16* dst, const Bf16* src, std::int64_t count, int num_threads, Scale scale) {
    parallel_for(count, 1, num_threads, [=](std::int64_t at, std::int64_t end) {
        for (; at + kLanes <= end; at += kLanes)
            store(dst + at, bf16_to_f32(dst + at) + scale(bf16_to_f32(src + at)));
        for (; at < end; ++at)
            dst[at] = f32_to_bf16(bf16_to_f32(dst[at]) + scale(bf16_to_f32(src[at])));
    });
}

struct ArgMax {
    std::int64_t index;
    bool is_finite;
};

// Index of the first maximum (undefined with a NaN), and whether all numbers are finite.
ArgMax argmax(const float* row, std::int64_t size) {
    constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
    F32x16 highest = splat(kMinusInf);
    U32x16 indices{}, non_finite{}, at{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes, at += kLanes) {
        F32x16 numbers;
        std::memcpy(&numbers, row + i, sizeof numbers);
        const U32x16 is_higher = less_mask(highest, numbers);
        highest = blend(is_higher, numbers, highest);
        indices = (at & is_higher) | (indices & ~is_higher);
        non_finite |= nan_mask(numbers - numbers);  // NaN where a number is not finite
    }
    ArgMax found{0, true};
    float largest = kMinusInf;
    for (int lane = 0; lane < kLanes; ++lane) {
        const bool is_first = highest[lane] == largest && indices[lane] < found.index;
        if (highest[lane] > largest || is_first)
            largest = highest[lane], found.index = indices[lane];
        found.is_finite = found.is_finite && non_finite[lane] == 0;
    }
    for (; i < size; ++i) {
        if (row[i] > largest) largest = row[i], found.index = i;
        found.is_finite = found.is_finite && std::isfinite(row[i]);
    }
    return found;
}

}  // namespace

extern "C" {

void baton_rms_norm(const RmsNormArgs* args) {
    const std::int64_t size = args->size;
    const std::vector<float> means = means_of_ranks(*args);
    with_weights(args->norm, [&](auto weights) {
        const auto norm_rows = [&](std::int64_t row, std::int64_t end) {
            for (; row < end; ++row) {
                const Bf16* const src = args->src + row * args->src_stride;
                const float mean = means.empty() ? mean_square(src, size) : means[row];
                norm_row(src, weights, args->dst + row * args->dst_stride, size, mean,
                         args->norm.epsilon);
            }
        };
        parallel_for(args->num_rows, size, args->num_threads, norm_rows);
    });
}

void baton_layer_norm(const LayerNormArgs* args) {
    const std::int64_t size = args->size;
    const auto norm_rows = [=](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row)
            layer_norm_row(args->norm, args->src + row * size, args->dst + row * size, size);
    };
    parallel_for(args->num_rows, size, args->num_threads, norm_rows);
}

void baton_gelu(const GeluArgs* args) {
    const auto apply = [=](std::int64_t at, std::int64_t end) {
        for (; at < end; ++at) {
            const F32x16 numbers = bf16_to_f32(args->src + at * kLanes);
            store(args->dst + at * kLanes, gelu(numbers, args->is_exact));
        }
    };
    parallel_for(args->count / kLanes, kLanes, args->num_threads, apply);
}

void baton_rope(const RopeArgs* args) {
    if (args->norm.weight == nullptr) return rotate(*args, NoWeights{});
    with_weights(args->norm, [=](auto weights) { rotate(*args, weights); });
}

void baton_gate(const GateArgs* args) {
    const std::int64_t size = args->size, up = gate_size(args->gate, size);
    const auto gate = [=](std::int64_t token, std::int64_t end) {
        for (; token < end; ++token) {
            const Bf16* const row = args->src + token * (up + size);
            gate_row(row, row + up, args->dst + token * size, size, args->gate);
        }
    };
    parallel_for(args->num_tokens, size, args->num_threads, gate);
}

void baton_argmax(const ArgmaxArgs* args) {
    const auto find = [=](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row) {
            const ArgMax found = argmax(args->logits + row * args->size, args->size);
            args->indices[row] = found.index, args->are_finite[row] = found.is_finite;
        }
    };
    parallel_for(args->num_rows, args->size, args->num_threads, find);
}

void baton_add(Bf16* dst, const Bf16* src, std::int64_t count, float scale,
               std::int32_t num_threads) {
    if (scale == 1.0f)
        add(dst, src, count, num_threads, [](auto numbers) { return numbers; });
    else
        add(dst, src, count, num_threads,
            [=](auto numbers) { return round_to_bf16(numbers * scale); });
}

}  // extern "C"
