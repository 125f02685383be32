// Paged attention of single tokens: each reads its sequence's blocks in place.
//
// A thread takes a sequence and goes over its blocks, KV head after KV head as they lie there, each
// with all query heads that share it: every key and value is read once, and in order. Where there
// are few sequences, each thread takes some of the heads. An answer adds up in the order of the
// context, whoever computes it.

#include "cache.h"
#include "pool.h"

#include <algorithm>
#include <limits>
#include <vector>

using namespace baton;

namespace {

constexpr int kPair = 2 * kLanes;  // numbers in a vector of pairs
constexpr int kTogether = 2;       // queries for which a value is widened once
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Up to sixteen slots of a block: scores of one query, in order, kNever in lanes past them.
// The same slots of the next head are fetched.
Floats score(const Bf16* query, const Bf16* keys, const Cache& cache, std::int64_t count) {
    const std::int64_t size = cache.head_dim, next = cache.block_size * size;
    Floats totals[kLanes] = {};
    float rests[kLanes];
    const std::int64_t paired = size / kPair * kPair;
    for (std::int64_t slot = 0; slot < count; ++slot)
        for (std::int64_t d = 0; d < paired; d += kPair) {
            Words some, others;
            std::memcpy(&some, query + d, sizeof some);
            std::memcpy(&others, keys + slot * size + d, sizeof others);
            __builtin_prefetch(keys + slot * size + d + next);
            add_products(totals[slot], some, others);
        }
    for (std::int64_t slot = 0; slot < kLanes; ++slot) {
        rests[slot] = slot < count ? 0.0f : kNever;
        for (std::int64_t d = paired; slot < count && d < size; ++d)
            rests[slot] += wide(query[d]) * wide(keys[slot * size + d]);
    }
    Floats rest;
    std::memcpy(&rest, rests, sizeof rest);
    return sums(totals) + rest;
}

// What one KV head's queries have seen so far. Of the totals each run of 32 has the even places
// before the odd ones, as they come out of pairs.
struct Seen {
    std::vector<float> most, weight, total, weights;
    std::int64_t size;

    Seen(std::int64_t queries, std::int64_t head_dim)
        : most(queries), weight(queries), total(queries * head_dim), weights(queries * kLanes),
          size(head_dim) {}

    void forget() {
        most.assign(most.size(), kNever);
        weight.assign(weight.size(), 0.0f);
        total.assign(total.size(), 0.0f);
    }

    float answer(std::int64_t query, std::int64_t d) const {
        const std::int64_t run = d / kPair * kPair, within = d - run;
        const std::int64_t at = run + kPair <= size ? run + within % 2 * kLanes + within / 2 : d;
        return total[query * size + at] / weight[query];
    }
};

// Turns a query's scores into weights, and what was seen before into their scale.
void weigh(Seen& seen, std::int64_t query, Floats scores) {
    const float before = seen.most[query], now = largest(scores);
    const float most = now > before ? now : before;
    if (most != before) {
        const float scale = std::exp(before - most);
        for (std::int64_t d = 0; d < seen.size; ++d) seen.total[query * seen.size + d] *= scale;
        seen.weight[query] *= scale;
    }
    // A largest score of NaN is never found, but its weight is one.
    const Floats weights = exponential(scores - (most == kNever ? 0.0f : most));
    std::memcpy(seen.weights.data() + query * kLanes, &weights, sizeof weights);
    seen.most[query] = most;
    seen.weight[query] += sum(weights);
}

template <int QUERIES>
void add_values(Seen& seen, std::int64_t query, const Bf16* values, const Cache& cache,
                std::int64_t count) {
    const std::int64_t next = cache.block_size * cache.head_dim;
    const float* weights = seen.weights.data() + query * kLanes;
    float* total = seen.total.data() + query * seen.size;
    std::int64_t d = 0;
    for (; d + kPair <= seen.size; d += kPair) {
        Floats even[QUERIES], odd[QUERIES];
        for (int q = 0; q < QUERIES; ++q) {
            std::memcpy(&even[q], total + q * seen.size + d, sizeof(Floats));
            std::memcpy(&odd[q], total + q * seen.size + d + kLanes, sizeof(Floats));
        }
        for (std::int64_t slot = 0; slot < count; ++slot) {
            Words pairs;
            std::memcpy(&pairs, values + slot * seen.size + d, sizeof pairs);
            __builtin_prefetch(values + slot * seen.size + d + next);
            const Floats low = (Floats)(pairs << 16), high = (Floats)(pairs & 0xffff0000u);
            for (int q = 0; q < QUERIES; ++q) {
                even[q] += weights[q * kLanes + slot] * low;
                odd[q] += weights[q * kLanes + slot] * high;
            }
        }
        for (int q = 0; q < QUERIES; ++q) {
            std::memcpy(total + q * seen.size + d, &even[q], sizeof(Floats));
            std::memcpy(total + q * seen.size + d + kLanes, &odd[q], sizeof(Floats));
        }
    }
    for (; d < seen.size; ++d)
        for (int q = 0; q < QUERIES; ++q)
            for (std::int64_t slot = 0; slot < count; ++slot)
                total[q * seen.size + d] +=
                    weights[q * kLanes + slot] * wide(values[slot * seen.size + d]);
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

    // For the heads from `first` on, as many as `seen` has room for.
    void attend(std::int64_t sequence, std::int64_t first, std::vector<Seen>& seen) const {
        const std::int64_t length = lengths[sequence];
        for (Seen& one : seen) one.forget();
        std::int64_t slot = window > 0 && length > window ? length - window : 0;
        for (std::int64_t count; slot < length; slot += count) {
            count = std::min({std::int64_t(kLanes), length - slot,
                              cache.block_size - slot % cache.block_size});
            for (std::int64_t i = 0; i < std::int64_t(seen.size()); ++i)
                look(sequence, first + i, slot, count, seen[i]);
        }
        for (std::int64_t i = 0; i < std::int64_t(seen.size()); ++i)
            answer(sequence, first + i, seen[i]);
    }

  private:
    void look(std::int64_t sequence, std::int64_t head, std::int64_t slot, std::int64_t count,
              Seen& seen) const {
        const Bf16* keys = at_slot(sequence, head, slot, 0);
        const Bf16* values = at_slot(sequence, head, slot, 1);
        for (std::int64_t query = 0; query < num_shared; ++query) {
            const Bf16* asked = queries + at_query(sequence, head, query);
            weigh(seen, query, scale * score(asked, keys, cache, count));
        }
        std::int64_t query = 0;
        for (; query + kTogether <= num_shared; query += kTogether)
            add_values<kTogether>(seen, query, values, cache, count);
        for (; query < num_shared; ++query) add_values<1>(seen, query, values, cache, count);
    }

    void answer(std::int64_t sequence, std::int64_t head, const Seen& seen) const {
        for (std::int64_t query = 0; query < num_shared; ++query)
            for (std::int64_t d = 0; d < cache.head_dim; ++d)
                answers[at_query(sequence, head, query) + d] = narrow(seen.answer(query, d));
    }

    std::int64_t at_query(std::int64_t sequence, std::int64_t head, std::int64_t query) const {
        return ((sequence * cache.num_kv_heads + head) * num_shared + query) * cache.head_dim;
    }

    const Bf16* at_slot(std::int64_t sequence, std::int64_t head, std::int64_t slot,
                        int which) const {
        const std::int64_t block = tables[sequence * table_stride + slot / cache.block_size];
        return cache.slots(block, layer, which, head) + slot % cache.block_size * cache.head_dim;
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
    std::int64_t at_once = num_kv_heads;  // heads
    while (num_sequences * (num_kv_heads / at_once) < num_threads && at_once % 2 == 0) at_once /= 2;
    const std::int64_t parts = num_kv_heads / at_once;
    std::atomic<std::int64_t> next{0};
    Pool::of_process().run(num_threads, [&](int, int) {
        std::vector<Seen> seen(at_once, Seen(num_shared, head_dim));
        for (std::int64_t task = next++; task < num_sequences * parts; task = next++)
            singles.attend(task / parts, task % parts * at_once, seen);
    });
}

}  // extern "C"
