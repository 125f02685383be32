// Grammar masks, logprobs and random draws of tokens: temperature, min-p, top-k, top-p and the
// Gumbel-max trick. Row by row.
//
// Without top-k and top-p, a draw is one pass over the row: a bound of a token's ratio, which needs
// no logarithm, rules out nearly all of them. Otherwise the likeliest tokens are collected first.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "abi.h"
#include "thread_pool.h"
#include "vector_math.h"

using namespace baton;

namespace {

typedef std::uint64_t U64x8 __attribute__((vector_size(64), aligned(8), may_alias));

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15, kFirst = 0xbf58476d1ce4e5b9,
                        kSecond = 0x94d049bb133111eb;
constexpr std::int64_t kFirstCandidates = 256, kMoreCandidates = 8;
constexpr float kMargin = 1.0001f;  // of bounds: more than the error of an exponential

// The splitmix64 finaliser.
template <typename Words>
Words mix(Words words) {
    words = (words ^ (words >> 30)) * kFirst;
    words = (words ^ (words >> 27)) * kSecond;
    return words ^ (words >> 31);
}

// The random number of a token: Exponential(1).
double exponential(std::uint64_t key, std::int64_t token) {
    const std::uint64_t bits = mix(std::uint64_t(token + 1) * kGolden + key) >> 1;
    const float uniform = (float(std::int64_t(bits)) + 0.5f) * 0x1p-63f;
    return -std::log1p(-double(std::min(uniform, 1 - 0x1p-24f)));
}

struct Token {
    float scaled;
    std::int64_t id;
};

// One row, and how it is drawn.
struct Row {
    const float* logits;
    std::int64_t size;
    std::uint64_t key;
    float temperature, largest, floor;  // scaled logits below the floor cannot be drawn

    float scaled(std::int64_t token) const {
        const float number = (logits[token] - largest) / temperature;
        return number < floor ? kNever : number;
    }

    F32x16 scaled_from(std::int64_t token) const {
        F32x16 numbers;
        std::memcpy(&numbers, logits + token, sizeof numbers);
        numbers = (numbers - largest) / temperature;
        return blend(less_mask(numbers, splat(floor)), splat(kNever), numbers);
    }

    double ratio(const Token& token) const {
        return std::exp(double(token.scaled)) / exponential(key, token.id);
    }
};

// Calls part(token, mask, numbers) for sixteen tokens at once; the last ones are padded by -inf.
template <typename Part>
void for_each_vector(const Row& row, Part part) {
    std::int64_t token = 0;
    for (; token + kLanes <= row.size; token += kLanes) part(token, row.scaled_from(token));
    if (token == row.size) return;
    F32x16 rest = splat(kNever);
    for (std::int64_t i = token; i < row.size; ++i) rest[i - token] = row.scaled(i);
    part(token, rest);
}

bool any(U32x16 mask) {
    std::uint32_t all = 0;
    for (int lane = 0; lane < kLanes; ++lane) all |= mask[lane];
    return all != 0;
}

// High words of the random bits of sixteen tokens: their numbers are at least so many 2^-32.
U32x16 random_words(std::uint64_t key, std::int64_t token) {
    const U64x8 lanes{1, 2, 3, 4, 5, 6, 7, 8};
    U32x16 words;
    auto* const halves = reinterpret_cast<U32x8*>(&words);
    for (int half = 0; half < 2; ++half) {
        const U64x8 ids = lanes + std::uint64_t(token + 8 * half);
        halves[half] = __builtin_convertvector(mix(ids * kGolden + key) >> 32, U32x8);
    }
    return words;
}

F32x16 to_floats(U32x16 words) {
    F32x16 numbers;
    for_each_reg([&](int i) {
        const U32Reg value = reg(words, i);
        reg(numbers, i) = __builtin_convertvector(value, F32Reg);
    });
    return numbers;
}

// Takes the token whose weight divided by its random number is the largest.
struct Winner {
    const Row& row;
    double ratio = 0;
    std::int64_t id = 0;

    void consider(const Token& token) {
        const double own = row.ratio(token);
        if (own > ratio) ratio = own, id = token.id;
    }
};

std::int64_t draw_any(const Row& row, std::int64_t likeliest) {
    Winner winner{row, 0, likeliest};
    winner.consider({row.scaled(likeliest), likeliest});
    for_each_vector(row, [&](std::int64_t token, F32x16 numbers) {
        if (!any(less_mask(splat(kNever), numbers))) return;
        // -log(1 - u) >= u >= words * 2^-32
        const F32x16 least =
            to_floats(random_words(row.key, token)) * float(winner.ratio * 0x1p-32);
        const U32x16 can_win = ~less_mask(exp(numbers) * kMargin, least);
        if (!any(can_win)) return;
        for (int lane = 0; lane < kLanes && token + lane < row.size; ++lane)
            if (can_win[lane] && numbers[lane] > kNever)
                winner.consider({numbers[lane], token + lane});
    });
    return winner.id;
}

// The count-th largest number of the row; -inf if fewer can be drawn.
float smallest_of_top(const Row& row, std::int64_t count) {
    std::vector<float> top;
    float bound = kNever;
    const auto keep = [&] {
        std::nth_element(top.begin(), top.begin() + (count - 1), top.end(), std::greater<float>());
        top.resize(count);
        bound = top.back();
    };
    for_each_vector(row, [&](std::int64_t, F32x16 numbers) {
        const U32x16 is_above = less_mask(splat(bound), numbers);
        if (!any(is_above)) return;
        for (int lane = 0; lane < kLanes; ++lane)
            if (is_above[lane]) top.push_back(numbers[lane]);
        if (std::int64_t(top.size()) >= 2 * count + 1024) keep();
    });
    if (std::int64_t(top.size()) < count) return kNever;
    keep();
    return bound;
}

// Tokens of at least this scaled logit that can be drawn: the largest first, then by id.
std::vector<Token> collect(const Row& row, float smallest) {
    std::vector<Token> found;
    for_each_vector(row, [&](std::int64_t token, F32x16 numbers) {
        const U32x16 is_below = less_mask(numbers, splat(smallest));
        if (!any(~is_below)) return;
        for (int lane = 0; lane < kLanes && token + lane < row.size; ++lane)
            if (!is_below[lane] && numbers[lane] > kNever)
                found.push_back({numbers[lane], token + lane});
    });
    std::sort(found.begin(), found.end(), [](const Token& a, const Token& b) {
        return a.scaled != b.scaled ? a.scaled > b.scaled : a.id < b.id;
    });
    return found;
}

double mass_of(const std::vector<Token>& tokens) {
    double mass = 0;
    for (const Token& token : tokens) mass += std::exp(double(token.scaled));
    return mass;
}

double whole_mass(const Row& row) {
    double mass = 0;
    for_each_vector(row, [&](std::int64_t, F32x16 numbers) { mass += sum(exp(numbers)); });
    return mass;
}

// The number of tokens that hold the share of the mass, or one more than there are.
std::size_t prefix_of(const std::vector<Token>& tokens, double whole, double share) {
    double before = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (before >= share) return i;
        before += std::exp(double(tokens[i].scaled)) / whole;
    }
    return before >= share ? tokens.size() : tokens.size() + 1;
}

std::int64_t draw_of(const Row& row, const std::vector<Token>& tokens, std::size_t count,
                     std::int64_t likeliest) {
    Winner winner{row, 0, likeliest};
    for (std::size_t i = 0; i < std::min(count, tokens.size()); ++i) winner.consider(tokens[i]);
    return winner.id;
}

std::int64_t draw(const Row& row, std::int64_t top_k, float top_p, std::int64_t likeliest) {
    if (top_k > 0 && top_k < row.size) {
        const std::vector<Token> tokens = collect(row, smallest_of_top(row, top_k));
        const std::size_t count =
            top_p < 1 ? prefix_of(tokens, mass_of(tokens), top_p) : tokens.size();
        return draw_of(row, tokens, count, likeliest);
    }
    if (top_p >= 1) return draw_any(row, likeliest);
    const double whole = whole_mass(row);
    for (std::int64_t most = kFirstCandidates;; most *= kMoreCandidates) {
        const bool has_all = most >= row.size;
        const std::vector<Token> tokens =
            collect(row, has_all ? kNever : smallest_of_top(row, most));
        const std::size_t count = prefix_of(tokens, whole, top_p);
        if (has_all || count <= tokens.size()) return draw_of(row, tokens, count, likeliest);
    }
}

float largest_of(const float* numbers, std::int64_t size) {
    F32x16 largest = splat(kNever);
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        F32x16 some;
        std::memcpy(&some, numbers + i, sizeof some);
        largest = lane_max(largest, some);
    }
    float found = kNever;
    for (int lane = 0; lane < kLanes; ++lane) found = std::max(found, largest[lane]);
    for (; i < size; ++i) found = std::max(found, numbers[i]);
    return found;
}

std::int64_t count_above(const Row& row, float logprob, float whole) {
    I32x16 counts{};
    for_each_vector(row, [&](std::int64_t, F32x16 numbers) {
        counts -= (I32x16)less_mask(splat(logprob), numbers - whole);
    });
    std::int64_t count = 0;
    for (int lane = 0; lane < kLanes; ++lane) count += counts[lane];
    return count;
}

void measure_row(const LogprobArgs& args, std::int64_t index) {
    const float* const logits = args.logits + args.rows[index] * args.size;
    const Row row{logits, args.size, 0, 1.0f, largest_of(logits, args.size), kNever};
    const float whole = float(std::log(whole_mass(row)));
    const float chosen = row.scaled(args.token_ids[index]) - whole;
    args.chosen[index] = chosen;
    args.ranks[index] = 1 + count_above(row, chosen, whole);
    if (args.num_tops == 0) return;
    std::vector<Token> tops = collect(row, smallest_of_top(row, args.num_tops));
    for (std::int64_t id = 0; id < args.size && std::int64_t(tops.size()) < args.num_tops; ++id)
        if (!(row.scaled(id) > kNever)) tops.push_back({kNever, id});  // too few can be drawn
    for (std::int64_t i = 0; i < args.num_tops; ++i) {
        args.top_ids[index * args.num_tops + i] = tops[i].id;
        args.top[index * args.num_tops + i] = tops[i].scaled - whole;
    }
}

void mask_row(const std::uint32_t* bits, float* scores, std::int64_t size) {
    const U32x16 lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (std::int64_t token = 0; token < size; token += kLanes) {
        const std::uint32_t word = bits[token / 32] >> token % 32;
        const std::int64_t count = std::min<std::int64_t>(kLanes, size - token);
        if ((word & 0xffff) == 0) {
            std::fill_n(scores + token, count, kNever);
        } else if (count == kLanes) {
            F32x16 numbers;
            std::memcpy(&numbers, scores + token, sizeof numbers);
            const U32x16 is_allowed = -((U32x16{} + word) >> lanes & 1u);
            numbers = blend(is_allowed, numbers, splat(kNever));
            std::memcpy(scores + token, &numbers, sizeof numbers);
        } else {
            for (std::int64_t i = 0; i < count; ++i)
                if (!(word >> i & 1)) scores[token + i] = kNever;
        }
    }
}

}  // namespace

extern "C" {

void baton_mask(const MaskArgs* args) {
    const auto mask_rows = [&](std::int64_t index, std::int64_t end) {
        for (; index < end; ++index)
            mask_row(args->bits + index * args->num_words,
                     args->scores + args->rows[index] * args->size, args->size);
    };
    parallel_for(args->num_masks, args->size, args->num_threads, mask_rows);
}

void baton_logprobs(const LogprobArgs* args) {
    const auto measure = [&](std::int64_t index, std::int64_t end) {
        for (; index < end; ++index) measure_row(*args, index);
    };
    parallel_for(args->num_rows, args->size, args->num_threads, measure);
}

void baton_draw(const DrawArgs* args) {
    const auto draw_rows = [&](std::int64_t index, std::int64_t end) {
        for (; index < end; ++index) {
            const std::int64_t place = args->rows[index];
            std::int64_t& chosen = args->token_ids[place];
            const float* const logits = args->logits + place * args->size;
            Row row{logits,
                    args->size,
                    std::uint64_t(args->keys[index]),
                    args->temperatures[index],
                    logits[chosen],
                    std::log(args->min_p[index])};
            chosen = draw(row, args->top_k[index], args->top_p[index], chosen);
        }
    };
    parallel_for(args->num_rows, args->size, args->num_threads, draw_rows);
}

}  // extern "C"
