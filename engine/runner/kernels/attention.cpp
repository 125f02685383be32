// Paged attention of single tokens: each reads its sequence's blocks in place.
//
// A thread takes one sequence's KV head at a time, with all query heads that share it, so that
// every key and value is read once. The answer adds up block by block in the order of the
// context, whoever computes it.

#include "cache.h"
#include "pool.h"

#include <limits>
#include <vector>

using namespace baton;

namespace {

constexpr int kPair = 2 * kLanes;  // numbers in a vector of pairs

float dot(const Bf16* left, const Bf16* right, std::int64_t size) {
    Floats total{};
    std::int64_t i = 0;
    for (; i + kPair <= size; i += kPair) {
        Words some, others;
        std::memcpy(&some, left + i, sizeof some);
        std::memcpy(&others, right + i, sizeof others);
        add_products(total, some, others);
    }
    float answer = sum(total);
    for (; i < size; ++i) answer += wide(left[i]) * wide(right[i]);
    return answer;
}

// What one KV head's queries have seen so far.
struct Seen {
    std::vector<float> most, weight, total, scores, factors;
    std::int64_t num_queries, size;

    Seen(std::int64_t queries, std::int64_t head_dim, std::int64_t block_size)
        : most(queries), weight(queries), total(queries * head_dim),
          scores(queries * (block_size + kLanes)), num_queries(queries), size(head_dim) {}

    void forget() {
        most.assign(most.size(), -std::numeric_limits<float>::infinity());
        weight.assign(weight.size(), 0.0f);
        total.assign(total.size(), 0.0f);
    }
};

// Turns a query's scores of a block into weights, and what was seen before into their scale.
void weigh(Seen& seen, std::int64_t query, float* scores, std::int64_t count) {
    float most = seen.most[query];
    for (std::int64_t i = 0; i < count; ++i)
        if (!(scores[i] <= most)) most = scores[i];
    const float before = seen.most[query];
    const float scale = before == most ? 1.0f : std::exp(before - most);
    float weight = seen.weight[query] * scale;
    for (std::int64_t i = 0; i < count; i += kLanes) {
        Floats some;
        std::memcpy(&some, scores + i, sizeof some);
        some = exponential(some - most);
        std::memcpy(scores + i, &some, sizeof some);
    }
    for (std::int64_t i = 0; i < count; ++i) weight += scores[i];
    if (scale != 1.0f)
        for (std::int64_t d = 0; d < seen.size; ++d) seen.total[query * seen.size + d] *= scale;
    seen.most[query] = most;
    seen.weight[query] = weight;
}

void add_values(Seen& seen, std::int64_t query, const float* weights, const Bf16* values,
                std::int64_t count) {
    float* total = seen.total.data() + query * seen.size;
    std::int64_t d = 0;
    for (; d + 4 * kLanes <= seen.size; d += 4 * kLanes) {
        Floats sums[4];
        std::memcpy(sums, total + d, sizeof sums);
        for (std::int64_t slot = 0; slot < count; ++slot)
            for (int v = 0; v < 4; ++v)
                sums[v] += weights[slot] * wide(values + slot * seen.size + d + v * kLanes);
        std::memcpy(total + d, sums, sizeof sums);
    }
    for (; d < seen.size; ++d)
        for (std::int64_t slot = 0; slot < count; ++slot)
            total[d] += weights[slot] * wide(values[slot * seen.size + d]);
}

struct Singles {
    Cache cache;
    std::int64_t layer;
    const Bf16* queries;  // [sequences, heads, head_dim]
    Bf16* answers;        // the same
    const std::int64_t* tables;
    std::int64_t table_stride;
    const std::int64_t* lengths;
    std::int64_t window;  // 0: none
    std::int64_t num_shared;  // query heads of a KV head
    float scale;

    void attend(std::int64_t sequence, std::int64_t head, Seen& seen) const {
        const std::int64_t size = cache.head_dim, length = lengths[sequence];
        const std::int64_t first_head = head * num_shared;
        const std::int64_t at = (sequence * cache.num_kv_heads * num_shared + first_head) * size;
        const std::int64_t begin = window > 0 && length > window ? length - window : 0;
        const std::int64_t stride = cache.block_size + kLanes;
        seen.forget();
        for (std::int64_t slot = begin; slot < length;) {
            const std::int64_t block = tables[sequence * table_stride + slot / cache.block_size];
            const std::int64_t within = slot % cache.block_size;
            const std::int64_t room = cache.block_size - within, left = length - slot;
            const std::int64_t count = room < left ? room : left;
            const Bf16* keys = cache.slots(block, layer, 0, head) + within * size;
            const Bf16* values = cache.slots(block, layer, 1, head) + within * size;
            for (std::int64_t i = 0; i < count; ++i)
                for (std::int64_t query = 0; query < num_shared; ++query)
                    seen.scores[query * stride + i] =
                        scale * dot(queries + at + query * size, keys + i * size, size);
            for (std::int64_t query = 0; query < num_shared; ++query) {
                float* scores = seen.scores.data() + query * stride;
                weigh(seen, query, scores, count);
                add_values(seen, query, scores, values, count);
            }
            slot += count;
        }
        for (std::int64_t query = 0; query < num_shared; ++query)
            for (std::int64_t d = 0; d < size; ++d)
                answers[at + query * size + d] =
                    narrow(seen.total[query * size + d] / seen.weight[query]);
    }
};

}  // namespace

extern "C" {

// keys, values: [tokens, kv_heads, head_dim], with strides between tokens.
void baton_write_kv(Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                    std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                    const Bf16* keys, std::int64_t key_stride, const Bf16* values,
                    std::int64_t value_stride, const std::int64_t* write_blocks,
                    const std::int64_t* write_offsets, std::int64_t num_tokens) {
    const Cache cache{blocks, num_layers, num_kv_heads, block_size, head_dim};
    for (std::int64_t token = 0; token < num_tokens; ++token)
        for (std::int64_t head = 0; head < num_kv_heads; ++head) {
            const std::int64_t block = write_blocks[token], at = write_offsets[token] * head_dim;
            const std::size_t bytes = head_dim * sizeof(Bf16);
            std::memcpy(cache.slots(block, layer, 0, head) + at,
                        keys + token * key_stride + head * head_dim, bytes);
            std::memcpy(cache.slots(block, layer, 1, head) + at,
                        values + token * value_stride + head * head_dim, bytes);
        }
}

// One token of each sequence, which sees `lengths` slots of its blocks, or the last `window`.
void baton_attend_singles(Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                          std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                          const Bf16* queries, Bf16* answers, const std::int64_t* tables,
                          std::int64_t table_stride, const std::int64_t* lengths,
                          std::int64_t window, std::int64_t num_sequences,
                          std::int64_t num_shared, float scale, int num_threads) {
    const Singles singles{{blocks, num_layers, num_kv_heads, block_size, head_dim},
                          layer, queries, answers, tables, table_stride, lengths, window,
                          num_shared, scale};
    std::atomic<std::int64_t> next{0};
    const std::int64_t num_tasks = num_sequences * num_kv_heads;
    Pool::of_process().run(num_threads, [&](int, int) {
        Seen seen(num_shared, head_dim, block_size);
        for (std::int64_t task = next++; task < num_tasks; task = next++)
            singles.attend(task / num_kv_heads, task % num_kv_heads, seen);
    });
}

}  // extern "C"
