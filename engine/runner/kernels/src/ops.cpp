// RMS norm, RoPE, SiLU gate, argmax and add: the operations between GEMMs. Each rounds where torch
// does.

#include "thread_pool.h"
#include "vector_math.h"

#include <algorithm>
#include <limits>

using namespace baton;

namespace {

float sum_of_squares(const Bf16* row, std::int64_t size) {
    F32x16 squares{};
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const F32x16 numbers = bf16_to_f32(row + i);
        squares += numbers * numbers;
    }
    float total = sum(squares);
    for (; i < size; ++i) total += bf16_to_f32(row[i]) * bf16_to_f32(row[i]);
    return total;
}

void norm_row(const Bf16* row, const Bf16* weight, Bf16* dst, std::int64_t size, float epsilon) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(row, size) / float(size) + epsilon);
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        store(dst + i, round_to_bf16(bf16_to_f32(row + i) * factor) * bf16_to_f32(weight + i));
    }
    for (; i < size; ++i)
        dst[i] = f32_to_bf16(round_to_bf16(bf16_to_f32(row[i]) * factor) * bf16_to_f32(weight[i]));
}

// RoPE of up to kLanes heads of a token, after an RMS norm if `weight` is not null.
struct Rope {
    const Bf16 *weight, *cosines, *sines;
    std::int64_t size;

    // Computes all norms together: one by one, each would wait for a square root and two divisions.
    void operator()(const Bf16* heads, Bf16* dst, int count, float epsilon) const {
        F32x16 lengths{};
        for (int head = 0; weight != nullptr && head < count; ++head)
            lengths[head] = sum_of_squares(heads + head * size, size);
        const F32x16 factors = rsqrt(lengths / float(size) + epsilon);
        for (int head = 0; head < count; ++head)
            rotate_head(heads + head * size, dst + head * size, factors[head]);
    }

  private:
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
        if (weight == nullptr) return numbers;
        return round_to_bf16(round_to_bf16(numbers * factor) * bf16_to_f32(weight + at));
    }
    float load_one(const Bf16* head, std::int64_t at, float factor) const {
        const float number = bf16_to_f32(head[at]);
        return weight == nullptr
                   ? number
                   : round_to_bf16(round_to_bf16(number * factor) * bf16_to_f32(weight[at]));
    }
};

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
    const auto norm = [=](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row)
            norm_row(args->src + row * size, args->weight, args->dst + row * size, size,
                     args->epsilon);
    };
    parallel_for(args->num_rows, size, args->num_threads, norm);
}

void baton_rope(const RopeArgs* args) {
    const std::int64_t num_heads = args->num_heads, head_dim = args->head_dim;
    const auto rotate = [=](std::int64_t token, std::int64_t end) {
        for (; token < end; ++token) {
            const Rope rope{args->norm_weight, args->cosines + token * head_dim,
                            args->sines + token * head_dim, head_dim};
            for (std::int64_t head = 0; head < num_heads; head += kLanes)
                rope(args->src + token * args->src_stride + head * head_dim,
                     args->dst + (token * num_heads + head) * head_dim,
                     int(std::min<std::int64_t>(num_heads - head, kLanes)), args->epsilon);
        }
    };
    parallel_for(args->num_tokens, num_heads * head_dim, args->num_threads, rotate);
}

void baton_swiglu(const Bf16* gate_up, Bf16* dst, std::int64_t num_tokens, std::int64_t size,
                  std::int32_t num_threads) {
    parallel_for(num_tokens, size, num_threads, [=](std::int64_t token, std::int64_t end) {
        for (; token < end; ++token) {
            const Bf16 *gate = gate_up + token * 2 * size, *up = gate + size;
            Bf16* row = dst + token * size;
            std::int64_t at = 0;
            for (; at + kLanes <= size; at += kLanes) {
                const F32x16 numbers = bf16_to_f32(gate + at);
                const F32x16 gated = round_to_bf16(numbers / (1.0f + exp(-numbers)));
                store(row + at, gated * bf16_to_f32(up + at));
            }
            for (; at < size; ++at) {
                const float number = bf16_to_f32(gate[at]);
                const float gated = round_to_bf16(number / (1.0f + std::exp(-number)));
                row[at] = f32_to_bf16(gated * bf16_to_f32(up[at]));
            }
        }
    });
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

void baton_add(Bf16* dst, const Bf16* src, std::int64_t count, std::int32_t num_threads) {
    parallel_for(count, 1, num_threads, [=](std::int64_t at, std::int64_t end) {
        for (; at + kLanes <= end; at += kLanes)
            store(dst + at, bf16_to_f32(dst + at) + bf16_to_f32(src + at));
        for (; at < end; ++at) dst[at] = f32_to_bf16(bf16_to_f32(dst[at]) + bf16_to_f32(src[at]));
    });
}

}  // extern "C"
