// The small steps between the products: norm, rotation, gate, sum. Each rounds where torch does.

#include "calls.h"
#include "pool.h"

#include <algorithm>
#include <limits>

using namespace baton;

namespace {

float inverse_length(const Bf16* row, std::int64_t size, float epsilon) {
    Floats squares{};
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Floats numbers = wide(row + i);
        squares += numbers * numbers;
    }
    float total = sum(squares);
    for (; i < size; ++i) total += wide(row[i]) * wide(row[i]);
    return 1.0f / std::sqrt(total / float(size) + epsilon);
}

void norm_row(const Bf16* row, const Bf16* weight, Bf16* target, std::int64_t size, float epsilon) {
    const float factor = inverse_length(row, size, epsilon);
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        store(target + i, rounded(wide(row + i) * factor) * wide(weight + i));
    }
    for (; i < size; ++i) target[i] = narrow(rounded(wide(row[i]) * factor) * wide(weight[i]));
}

void rotate_row(Bf16* row, const Bf16* cosines, const Bf16* sines, std::int64_t size) {
    const std::int64_t half = size / 2;
    std::int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Floats first = wide(row + i), second = wide(row + i + half);
        const Floats cosine = wide(cosines + i), sine = wide(sines + i);
        const Floats later_cosine = wide(cosines + i + half), later_sine = wide(sines + i + half);
        store(row + i, rounded(first * cosine) + rounded(-second * sine));
        store(row + i + half, rounded(second * later_cosine) + rounded(first * later_sine));
    }
    for (; i < half; ++i) {
        const float first = wide(row[i]), second = wide(row[i + half]);
        const float cosine = wide(cosines[i]), sine = wide(sines[i]);
        const float later_cosine = wide(cosines[i + half]), later_sine = wide(sines[i + half]);
        row[i] = narrow(rounded(first * cosine) + rounded(-second * sine));
        row[i + half] = narrow(rounded(second * later_cosine) + rounded(first * later_sine));
    }
}

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
    share_out(num_tokens * num_heads, size, num_threads, [=](std::int64_t at, std::int64_t end) {
        for (; at < end; ++at) {
            const std::int64_t token = at / num_heads, head = at % num_heads;
            const Bf16* row = source + token * token_stride + head * size;
            Bf16* rotated = target + at * size;
            if (weight != nullptr)
                norm_row(row, weight, rotated, size, epsilon);
            else
                std::memcpy(rotated, row, size * sizeof(Bf16));
            rotate_row(rotated, cosines + token * size, sines + token * size, size);
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
