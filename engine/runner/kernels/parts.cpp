// The small steps between the products: norm, rotation, gate, sum. Each rounds where torch does.

#include "calls.h"
#include "pool.h"

#include <algorithm>
#include <limits>

using namespace baton;

namespace {

float sum_of_squares(const Bf16* row, std::int64_t size) {
    Floats squares{};
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Floats numbers = wide(row + i);
        squares += numbers * numbers;
    }
    float total = sum(squares);
    for (; i < size; ++i) total += wide(row[i]) * wide(row[i]);
    return total;
}

void norm_row(const Bf16* row, const Bf16* weight, Bf16* target, std::int64_t size, float epsilon) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(row, size) / float(size) + epsilon);
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        store(target + i, rounded(wide(row + i) * factor) * wide(weight + i));
    }
    for (; i < size; ++i) target[i] = narrow(rounded(wide(row[i]) * factor) * wide(weight[i]));
}

// What is done to some heads of a token: a norm, if there is a weight, and the rotation.
struct Turn {
    const Bf16 *weight, *cosines, *sines;
    std::int64_t size;

    // One after the other, each factor would wait for a root and two divisions.
    void operator()(const Bf16* heads, Bf16* turned, int count, float epsilon) const {
        Floats lengths{};
        for (int head = 0; weight != nullptr && head < count; ++head)
            lengths[head] = sum_of_squares(heads + head * size, size);
        const Floats factors = inverse_roots(lengths / float(size) + epsilon);
        for (int head = 0; head < count; ++head)
            turn(heads + head * size, turned + head * size, factors[head]);
    }

  private:
    void turn(const Bf16* head, Bf16* turned, float factor) const {
        const std::int64_t half = size / 2;
        std::int64_t i = 0;
        for (; i + kLanes <= half; i += kLanes) {
            const std::int64_t later = i + half;
            const Floats first = some(head, i, factor), second = some(head, later, factor);
            store(turned + i, rounded(first * wide(cosines + i)) + rounded(-second * wide(sines + i)));
            store(turned + later,
                  rounded(second * wide(cosines + later)) + rounded(first * wide(sines + later)));
        }
        for (; i < half; ++i) {
            const std::int64_t later = i + half;
            const float first = one(head, i, factor), second = one(head, later, factor);
            turned[i] = narrow(rounded(first * wide(cosines[i])) + rounded(-second * wide(sines[i])));
            turned[later] =
                narrow(rounded(second * wide(cosines[later])) + rounded(first * wide(sines[later])));
        }
    }

    Floats some(const Bf16* head, std::int64_t at, float factor) const {
        const Floats numbers = wide(head + at);
        if (weight == nullptr) return numbers;
        return rounded(rounded(numbers * factor) * wide(weight + at));
    }
    float one(const Bf16* head, std::int64_t at, float factor) const {
        const float number = wide(head[at]);
        return weight == nullptr ? number : rounded(rounded(number * factor) * wide(weight[at]));
    }
};

struct Peak {
    std::int64_t place;
    bool is_finite;
};

// The first of the largest numbers, where none is a NaN; and whether all are finite.
Peak peak_of(const float* row, std::int64_t size) {
    constexpr float kLeast = -std::numeric_limits<float>::infinity();
    Floats most = fill(kLeast);
    Words places{}, strange{}, at{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes, at += kLanes) {
        Floats numbers;
        std::memcpy(&numbers, row + i, sizeof numbers);
        const Words is_more = where_less(most, numbers);
        most = chosen(is_more, numbers, most);
        places = (at & is_more) | (places & ~is_more);
        strange |= where_nan(numbers - numbers);  // where they are not finite
    }
    Peak peak{0, true};
    float largest = kLeast;
    for (int lane = 0; lane < kLanes; ++lane) {
        const bool is_first = most[lane] == largest && places[lane] < peak.place;
        if (most[lane] > largest || is_first) largest = most[lane], peak.place = places[lane];
        peak.is_finite = peak.is_finite && strange[lane] == 0;
    }
    for (; i < size; ++i) {
        if (row[i] > largest) largest = row[i], peak.place = i;
        peak.is_finite = peak.is_finite && std::isfinite(row[i]);
    }
    return peak;
}

}  // namespace

extern "C" {

// states, target: [rows, size].
void baton_norm(const Bf16* states, const Bf16* weight, Bf16* target, std::int64_t num_rows,
                std::int64_t size, float epsilon, int num_threads) {
    share_out(num_rows, size, num_threads, [=](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row)
            norm_row(states + row * size, weight, target + row * size, size, epsilon);
    });
}

// source: [tokens, heads, size] with a stride between tokens; target the same without one.
// cosines, sines: [tokens, size]. weight: of the norm before the rotation, or null.
void baton_rotate(const Bf16* source, std::int64_t token_stride, const Bf16* weight,
                  const Bf16* cosines, const Bf16* sines, Bf16* target, std::int64_t num_tokens,
                  std::int64_t num_heads, std::int64_t size, float epsilon, int num_threads) {
    share_out(num_tokens, num_heads * size, num_threads, [=](std::int64_t token, std::int64_t end) {
        for (; token < end; ++token) {
            const Turn turn{weight, cosines + token * size, sines + token * size, size};
            for (std::int64_t head = 0; head < num_heads; head += kLanes)
                turn(source + token * token_stride + head * size,
                     target + (token * num_heads + head) * size,
                     int(std::min<std::int64_t>(num_heads - head, kLanes)), epsilon);
        }
    });
}

// both: [tokens, 2 * size], the gate before the other half; target: [tokens, size].
void baton_gate(const Bf16* both, Bf16* target, std::int64_t num_tokens, std::int64_t size,
                int num_threads) {
    share_out(num_tokens, size, num_threads, [=](std::int64_t token, std::int64_t end) {
        for (; token < end; ++token) {
            const Bf16 *gate = both + token * 2 * size, *other = gate + size;
            Bf16* row = target + token * size;
            std::int64_t at = 0;
            for (; at + kLanes <= size; at += kLanes) {
                const Floats numbers = wide(gate + at);
                const Floats gated = rounded(numbers / (1.0f + exponential(-numbers)));
                store(row + at, gated * wide(other + at));
            }
            for (; at < size; ++at) {
                const float number = wide(gate[at]);
                const float gated = rounded(number / (1.0f + std::exp(-number)));
                row[at] = narrow(gated * wide(other[at]));
            }
        }
    });
}

// numbers: [rows, size], of each the peak.
void baton_peaks(const float* numbers, std::int64_t num_rows, std::int64_t size,
                 std::int64_t* places, bool* are_finite, int num_threads) {
    share_out(num_rows, size, num_threads, [=](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row) {
            const Peak peak = peak_of(numbers + row * size, size);
            places[row] = peak.place, are_finite[row] = peak.is_finite;
        }
    });
}

// states, other: so many numbers; the sums take the place of the states.
void baton_add(Bf16* states, const Bf16* other, std::int64_t count, int num_threads) {
    share_out(count, 1, num_threads, [=](std::int64_t at, std::int64_t end) {
        for (; at + kLanes <= end; at += kLanes)
            store(states + at, wide(states + at) + wide(other + at));
        for (; at < end; ++at) states[at] = narrow(wide(states[at]) + wide(other[at]));
    });
}

}  // extern "C"
