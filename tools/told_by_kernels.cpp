// What each kernel makes of drawn numbers, a line of bits for each call: the same program, built for
// two processors, must tell the same.

#include "calls.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

using namespace baton;

extern "C" {

std::int64_t baton_packed_bytes(std::int64_t num_rows, std::int64_t num_columns);
void baton_pack(const Bf16* weights, std::uint32_t* packed, std::int64_t num_rows,
                std::int64_t num_columns, int num_threads);
std::int64_t baton_quantized_bytes(std::int64_t bits, std::int64_t num_rows,
                                   std::int64_t num_columns, std::int64_t group);
void baton_pack_quantized(const std::uint8_t* numbers, const float* scales,
                          const std::uint8_t* zeros, std::uint8_t* packed, std::int64_t bits,
                          std::int64_t num_rows, std::int64_t num_columns, std::int64_t group,
                          int num_threads);
void baton_peaks(const float* numbers, std::int64_t num_rows, std::int64_t size,
                 std::int64_t* places, bool* are_finite, int num_threads);

}  // extern "C"

namespace {

// From the begin of a cache line on, and zero.
struct alignas(64) Line {
    std::uint8_t bytes[64] = {};
};

struct Room {
    std::vector<Line> lines;
    explicit Room(std::int64_t num_bytes) : lines(num_bytes / 64 + 1) {}
    template <typename Number>
    Number* of() { return reinterpret_cast<Number*>(lines.data()); }
};

struct Numbers {
    Room room;
    std::int64_t count;
    explicit Numbers(std::int64_t count) : room(count * sizeof(Bf16)), count(count) {}
    operator Bf16*() { return room.of<Bf16>(); }
};

// Between 0 and 1; the same on each machine, as what a library draws need not be.
float drawn() {
    static std::uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return float(state >> 40) / float(1 << 24);
}

float drawn_around_zero() {
    float sum = -6;
    for (int i = 0; i < 12; ++i) sum += drawn();
    return sum;
}

Numbers some(std::int64_t count, float scale = 1) {
    Numbers numbers(count);
    for (std::int64_t i = 0; i < count; ++i) {
        const float number = drawn_around_zero() * scale;
        std::memcpy(numbers.room.of<char>() + i * sizeof(Bf16),
                    reinterpret_cast<const char*>(&number) + sizeof(Bf16), sizeof(Bf16));
    }
    return numbers;
}

void tell(const char* kernel, Numbers& numbers) {
    std::printf("%s", kernel);
    for (std::int64_t i = 0; i < numbers.count; ++i)
        std::printf(" %04x", numbers.room.of<std::uint16_t>()[i]);
    std::puts("");
}

void multiply(std::int64_t tokens, std::int64_t rows, std::int64_t columns, int threads) {
    Numbers states = some(tokens * columns), weights = some(rows * columns, 0.1f);
    Numbers bias = some(rows), answer(tokens * rows);
    Room packed(baton_packed_bytes(rows, columns));
    baton_pack(weights, packed.of<std::uint32_t>(), rows, columns, threads);
    baton_linear(states, packed.of<void>(), bias, answer, tokens, rows, columns, threads);
    tell("linear", answer);
}

void multiply_quantized(int bits, std::int64_t group, std::int64_t tokens, std::int64_t rows,
                        std::int64_t columns, int threads) {
    const std::int64_t groups = rows * columns / group;
    std::vector<std::uint8_t> numbers(rows * columns), zeros(groups, 1 << (bits - 1));
    std::vector<float> scales(groups);
    for (auto& number : numbers) number = std::uint8_t(drawn() * float((1 << bits) - 1));
    for (auto& scale : scales) scale = 0.01f * (1 + drawn());
    Numbers states = some(tokens * columns), answer(tokens * rows);
    Room packed(baton_quantized_bytes(bits, rows, columns, group));
    baton_pack_quantized(numbers.data(), scales.data(), zeros.data(), packed.of<std::uint8_t>(),
                         bits, rows, columns, group, threads);
    baton_quantized_linear(states, packed.of<std::uint8_t>(), nullptr, answer, tokens, bits, rows,
                           columns, group, threads);
    tell(bits == 8 ? "int8" : "int4", answer);
}

void do_parts(std::int64_t tokens, std::int64_t size, int threads) {
    Numbers states = some(tokens * size), weight = some(size), other = some(tokens * size);
    Numbers normed(tokens * size), gated(tokens * (size / 2));
    baton_norm(states, weight, normed, tokens, size, 1e-6f, threads);
    tell("norm", normed);
    baton_gate(states, gated, tokens, size / 2, threads);
    tell("gate", gated);
    baton_add(states, other, tokens * size, threads);
    tell("add", states);
}

void find_peaks(std::int64_t tokens, std::int64_t size, int threads) {
    std::vector<float> numbers(tokens * size);
    for (auto& number : numbers) number = drawn_around_zero();
    std::vector<std::int64_t> places(tokens);
    Room are_finite(tokens);
    baton_peaks(numbers.data(), tokens, size, places.data(), are_finite.of<bool>(), threads);
    std::printf("peaks");
    for (const auto place : places) std::printf(" %04x", unsigned(place));
    std::puts("");
}

void attend(std::int64_t dim, std::int64_t window, int threads) {
    constexpr std::int64_t kLayers = 2, kLayer = 1, kHeads = 2, kShared = 4, kBlock = 16, kBlocks = 12;
    constexpr std::int64_t kLength = 150, kTokens = 37, kSequences = 3, kTable = 10;
    const float scale = 1 / std::sqrt(float(dim));
    std::vector<std::int64_t> tables, blocks, offsets, lengths{kLength, 5, 66};
    for (int i = 0; i < kSequences * kTable; ++i) tables.push_back((i % kTable * 7 + 3) % kBlocks);
    for (int i = 0; i < kLength; ++i) blocks.push_back(tables[i / kBlock]), offsets.push_back(i % kBlock);

    Numbers keys = some(kLength * kHeads * dim), values = some(kLength * kHeads * dim);
    Numbers kv(kBlocks * kLayers * 2 * kHeads * kBlock * dim);
    baton_write_kv(kv, kLayers, kHeads, kBlock, dim, kLayer, keys, kHeads * dim, values,
                   kHeads * dim, blocks.data(), offsets.data(), kLength, threads);

    Numbers queries = some(kTokens * kHeads * kShared * dim), answers(queries.count);
    baton_attend_chunk(kv, kLayers, kHeads, kBlock, dim, kLayer, queries, answers, tables.data(),
                       kTokens, kLength, window, kShared, scale, threads);
    tell("chunk", answers);
    Numbers singles(kSequences * kHeads * kShared * dim);
    baton_attend_singles(kv, kLayers, kHeads, kBlock, dim, kLayer, queries, singles, tables.data(),
                         kTable, lengths.data(), window, kSequences, kShared, scale, threads);
    tell("singles", singles);

    Numbers cosines = some(kTokens * dim, 0.7f), sines = some(kTokens * dim, 0.7f), weight = some(dim);
    baton_rotate(queries, kHeads * kShared * dim, weight, cosines, sines, answers, kTokens,
                 kHeads * kShared, dim, 1e-6f, threads);
    tell("rotate", answers);
}

}  // namespace

int main() {
    for (const int threads : {1, 2}) {
        for (const std::int64_t tokens : {1, 3, 7, 33}) {
            multiply(tokens, 64, 32, threads);
            multiply(tokens, 200, 96, threads);
            multiply(tokens, 130, 258, threads);
            multiply_quantized(8, 256, tokens, 130, 256, threads);
            multiply_quantized(4, 32, tokens, 200, 96, threads);
            do_parts(tokens, 96, threads);
            do_parts(tokens, 258, threads);
            find_peaks(tokens, 999, threads);
        }
        for (const std::int64_t dim : {32, 128})
            for (const std::int64_t window : {0, 20}) attend(dim, window, threads);
    }
}
