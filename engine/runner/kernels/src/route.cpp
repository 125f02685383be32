// Routing of a mixture of experts: router logits in float32, scores, and the choice of experts.
//
// A logit is summed in the order of the columns, sixteen partial sums at a time, independent of the
// other tokens and of the number of threads.

#include "gate.h"
#include "thread_pool.h"

#include <algorithm>
#include <limits>
#include <vector>

using namespace baton;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::int64_t kUnitExperts = 8;  // of a unit of work
constexpr std::int64_t kPassTokens = 64;  // stay in L2 with the experts of a unit
#if defined(__AVX512BF16__)
constexpr int kTileSize = 4;  // experts and tokens whose sums are kept in registers
#else
constexpr int kTileSize = 2;
#endif

std::int64_t padded(std::int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

constexpr int kRegs = kLanes / kRegLanes;

F32Reg widen(const Bf16* numbers) {
    U16Reg halves;
    std::memcpy(&halves, numbers, sizeof halves);
    return (F32Reg)(__builtin_convertvector(halves, U32Reg) << 16);
}

// Logits of kTileSize experts and TOKENS tokens.
template <int TOKENS>
void multiply_tile(const float* const (&experts)[kTileSize], const Bf16* const (&tokens)[TOKENS],
                   std::int64_t size, float (&logits)[TOKENS][kTileSize]) {
    F32Reg acc[TOKENS][kTileSize][kRegs] = {};
    std::int64_t at = 0;
    for (; at + kLanes <= size; at += kLanes)
#pragma GCC unroll 4
        for (int r = 0; r < kRegs; ++r) {
            F32Reg activations[TOKENS];
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t) activations[t] = widen(tokens[t] + at + r * kRegLanes);
#pragma GCC unroll 4
            for (int e = 0; e < kTileSize; ++e) {
                const F32Reg& weights =
                    reinterpret_cast<const F32Reg&>(experts[e][at + r * kRegLanes]);
#pragma GCC unroll 4
                for (int t = 0; t < TOKENS; ++t) acc[t][e][r] += weights * activations[t];
            }
        }
    for (int t = 0; t < TOKENS; ++t)
        for (int e = 0; e < kTileSize; ++e) {
            F32x16 sums;
            std::memcpy(&sums, acc[t][e], sizeof sums);
            logits[t][e] = sum(sums);
            for (std::int64_t i = at; i < size; ++i)
                logits[t][e] += experts[e][i] * bf16_to_f32(tokens[t][i]);
        }
}

// A tile at the end of its range repeats the last expert or token.
template <int TOKENS>
void add_logits(const RouteArgs& args, float* logits, std::int64_t expert, std::int64_t token,
                std::int64_t end_token) {
    const float* experts[kTileSize];
    const Bf16* tokens[TOKENS];
    const std::int64_t last = args.num_experts - 1;
    for (int e = 0; e < kTileSize; ++e)
        experts[e] = args.router + std::min(expert + e, last) * args.hidden_size;
    for (int t = 0; t < TOKENS; ++t)
        tokens[t] = args.src + std::min(token + t, end_token - 1) * args.hidden_size;
    float found[TOKENS][kTileSize];
    multiply_tile<TOKENS>(experts, tokens, args.hidden_size, found);
    for (int t = 0; t < TOKENS && token + t < end_token; ++t)
        for (int e = 0; e < kTileSize && expert + e <= last; ++e) {
            const float bias = args.bias == nullptr ? 0.0f : args.bias[expert + e];
            logits[(token + t) * padded(args.num_experts) + expert + e] = found[t][e] + bias;
        }
}

// logits: [tokens, padded experts].
void compute_logits(const RouteArgs& args, float* logits) {
    const std::int64_t units = (args.num_experts + kUnitExperts - 1) / kUnitExperts;
    const std::int64_t unit_size = kUnitExperts * args.hidden_size * args.num_tokens;
    const auto multiply = [&](std::int64_t unit, std::int64_t end) {
        for (std::int64_t pass = 0; pass < args.num_tokens; pass += kPassTokens) {
            const std::int64_t end_token = std::min(pass + kPassTokens, args.num_tokens);
            const std::int64_t end_expert = std::min(end * kUnitExperts, args.num_experts);
            for (std::int64_t at = unit * kUnitExperts; at < end_expert; at += kTileSize) {
                std::int64_t token = pass;
                for (; token + 1 < end_token; token += kTileSize)
                    add_logits<kTileSize>(args, logits, at, token, end_token);
                if (token < end_token) add_logits<1>(args, logits, at, token, end_token);
            }
        }
    };
    parallel_for(units, unit_size, args.num_threads, multiply);
}

// Softmax of `padded(count)` numbers in place; those beyond `count` are ignored.
void softmax(float* numbers, std::int64_t count) {
    std::fill(numbers + count, numbers + padded(count), -kInf);
    F32x16 highest = splat(-kInf), total{}, scores;
    for (std::int64_t at = 0; at < count; at += kLanes) {
        std::memcpy(&scores, numbers + at, sizeof scores);
        highest = lane_max(highest, scores);
    }
    const float max = reduce_max(highest);
    for (std::int64_t at = 0; at < count; at += kLanes) {
        std::memcpy(&scores, numbers + at, sizeof scores);
        scores = exp(scores - max);
        std::memcpy(numbers + at, &scores, sizeof scores);
        total += scores;
    }
    const float divisor = sum(total);
    for (std::int64_t i = 0; i < count; ++i) numbers[i] /= divisor;
}

void apply_sigmoid(float* numbers, std::int64_t count) {
    std::fill(numbers + count, numbers + padded(count), 0.0f);
    for (std::int64_t at = 0; at < count; at += kLanes) {
        F32x16 some;
        std::memcpy(&some, numbers + at, sizeof some);
        some = multiply_sigmoid(splat(1.0f), some);
        std::memcpy(numbers + at, &some, sizeof some);
    }
}

// Finds the indices of the largest numbers, largest first. A NaN counts as infinity.
void find_top(const float* numbers, std::int64_t count, std::int64_t top, std::int64_t* indices) {
    const auto key = [numbers](std::int64_t i) {
        return std::isnan(numbers[i]) ? kInf : numbers[i];
    };
    std::int64_t found = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const float number = key(i);
        if (found == top && !(number > key(indices[top - 1]))) continue;
        std::int64_t at = found < top ? found++ : top - 1;
        for (; at > 0 && number > key(indices[at - 1]); --at) indices[at] = indices[at - 1];
        indices[at] = i;
    }
}

// Sets the scores outside the best groups to -inf. A group counts by its best experts.
void hide_other_groups(float* scores, const RouteArgs& args) {
    const std::int64_t size = args.num_experts / args.num_groups;
    const std::int64_t num_best = std::min(args.group_best, size);
    std::vector<float> totals(args.num_groups);
    std::vector<std::int64_t> best(num_best);
    for (std::int64_t group = 0; group < args.num_groups; ++group) {
        find_top(scores + group * size, size, num_best, best.data());
        for (int i = 0; i < num_best; ++i) totals[group] += scores[group * size + best[i]];
    }
    std::vector<std::int64_t> open(args.top_groups);
    find_top(totals.data(), args.num_groups, args.top_groups, open.data());
    for (std::int64_t group = 0; group < args.num_groups; ++group)
        if (std::find(open.begin(), open.end(), group) == open.end())
            std::fill_n(scores + group * size, size, -kInf);
}

// Buffers of a thread for one token at a time.
struct Chooser {
    const RouteArgs& args;
    std::vector<float> choice, top;

    explicit Chooser(const RouteArgs& args)
        : args(args), choice(args.num_experts), top(padded(args.top_k)) {}

    // scores: logits, which are overwritten.
    void operator()(float* scores, std::int64_t* expert_ids, float* weights) {
        if (args.scoring == Scoring::kSoftmax) softmax(scores, args.num_experts);
        if (args.scoring == Scoring::kSigmoid) apply_sigmoid(scores, args.num_experts);
        for (std::int64_t i = 0; i < args.num_experts; ++i)
            choice[i] = scores[i] + (args.correction_bias ? args.correction_bias[i] : 0.0f);
        if (args.num_groups > 1) hide_other_groups(choice.data(), args);
        find_top(choice.data(), args.num_experts, args.top_k, expert_ids);
        for (std::int64_t i = 0; i < args.top_k; ++i) top[i] = scores[expert_ids[i]];
        if (args.scoring == Scoring::kSoftmaxOfTop) softmax(top.data(), args.top_k);
        float total = args.normalizes ? 1e-20f : 1.0f;
        for (std::int64_t i = 0; args.normalizes && i < args.top_k; ++i) total += top[i];
        for (std::int64_t i = 0; i < args.top_k; ++i) weights[i] = top[i] / total * args.scale;
    }
};

}  // namespace

extern "C" {

void baton_route(const RouteArgs* args) {
    thread_local std::vector<float> buffer;
    const std::int64_t stride = padded(args->num_experts);
    buffer.resize(args->num_tokens * stride);
    float* const logits = buffer.data();  // all threads use the buffer of the calling thread
    compute_logits(*args, logits);
    const auto choose = [=](std::int64_t token, std::int64_t end) {
        Chooser choose_one(*args);
        for (; token < end; ++token)
            choose_one(logits + token * stride, args->expert_ids + token * args->top_k,
                       args->weights + token * args->top_k);
    };
    constexpr std::int64_t kSteps = 16;  // a score takes as long as this many simple operations
    parallel_for(args->num_tokens, kSteps * args->num_experts, args->num_threads, choose);
}

}  // extern "C"
