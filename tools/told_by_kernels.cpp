// Prints the results of every kernel on random numbers, one line of bits per call. Builds of this
// program for two architectures must print the same, up to rounding.

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

// Zeroed and aligned to a cache line.
struct alignas(64) Line {
    std::uint8_t bytes[64] = {};
};

struct AlignedBuffer {
    std::vector<Line> lines;
    explicit AlignedBuffer(std::int64_t num_bytes) : lines(num_bytes / 64 + 1) {}
    template <typename Number>
    Number* as() { return reinterpret_cast<Number*>(lines.data()); }
};

struct Numbers {
    AlignedBuffer buffer;
    std::int64_t count;
    explicit Numbers(std::int64_t count) : buffer(count * sizeof(Bf16)), count(count) {}
    operator Bf16*() { return buffer.as<Bf16>(); }
};

// Uniform in [0, 1). Library generators are not guaranteed to give the same numbers everywhere.
float uniform() {
    static std::uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return float(state >> 40) / float(1 << 24);
}

// Approximately standard normal.
float normal() {
    float sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
}

Numbers random_numbers(std::int64_t count, float scale = 1) {
    Numbers numbers(count);
    for (std::int64_t i = 0; i < count; ++i) {
        const float number = normal() * scale;
        std::memcpy(numbers.buffer.as<char>() + i * sizeof(Bf16),
                    reinterpret_cast<const char*>(&number) + sizeof(Bf16), sizeof(Bf16));
    }
    return numbers;
}

void print_bits(const char* kernel, Numbers& numbers) {
    std::printf("%s", kernel);
    for (std::int64_t i = 0; i < numbers.count; ++i)
        std::printf(" %04x", numbers.buffer.as<std::uint16_t>()[i]);
    std::puts("");
}

void multiply(std::int64_t tokens, std::int64_t rows, std::int64_t columns, int threads) {
    Numbers activations = random_numbers(tokens * columns);
    Numbers weights = random_numbers(rows * columns, 0.1f);
    Numbers bias = random_numbers(rows), dst(tokens * rows);
    AlignedBuffer packed(baton_packed_bytes(rows, columns));
    baton_pack(weights, packed.as<std::uint32_t>(), rows, columns, threads);
    baton_linear(activations, packed.as<void>(), bias, dst, tokens, rows, columns, threads);
    print_bits("linear", dst);
}

void multiply_quantized(int bits, std::int64_t group, std::int64_t tokens, std::int64_t rows,
                        std::int64_t columns, int threads) {
    const std::int64_t groups = rows * columns / group;
    std::vector<std::uint8_t> numbers(rows * columns), zeros(groups, 1 << (bits - 1));
    std::vector<float> scales(groups);
    for (auto& number : numbers) number = std::uint8_t(uniform() * float((1 << bits) - 1));
    for (auto& scale : scales) scale = 0.01f * (1 + uniform());
    Numbers activations = random_numbers(tokens * columns), dst(tokens * rows);
    AlignedBuffer packed(baton_quantized_bytes(bits, rows, columns, group));
    baton_pack_quantized(numbers.data(), scales.data(), zeros.data(), packed.as<std::uint8_t>(),
                         bits, rows, columns, group, threads);
    baton_quantized_linear(activations, packed.as<std::uint8_t>(), nullptr, dst, tokens, bits, rows,
                           columns, group, threads);
    print_bits(bits == 8 ? "int8" : "int4", dst);
}

void run_elementwise(std::int64_t tokens, std::int64_t size, int threads) {
    Numbers activations = random_numbers(tokens * size), weight = random_numbers(size);
    Numbers other = random_numbers(tokens * size);
    Numbers normed(tokens * size), gated(tokens * (size / 2));
    baton_norm(activations, weight, normed, tokens, size, 1e-6f, threads);
    print_bits("norm", normed);
    baton_gate(activations, gated, tokens, size / 2, threads);
    print_bits("gate", gated);
    baton_add(activations, other, tokens * size, threads);
    print_bits("add", activations);
}

void find_peaks(std::int64_t tokens, std::int64_t size, int threads) {
    std::vector<float> numbers(tokens * size);
    for (auto& number : numbers) number = normal();
    std::vector<std::int64_t> indices(tokens);
    AlignedBuffer are_finite(tokens);
    baton_peaks(numbers.data(), tokens, size, indices.data(), are_finite.as<bool>(), threads);
    std::printf("peaks");
    for (const auto index : indices) std::printf(" %04x", unsigned(index));
    std::puts("");
}

void attend(std::int64_t dim, std::int64_t window, int threads) {
    constexpr std::int64_t kLayers = 2, kLayer = 1, kHeads = 2, kGroup = 4, kBlock = 16, kBlocks = 12;
    constexpr std::int64_t kLength = 150, kTokens = 37, kSequences = 3, kTable = 10;
    const float scale = 1 / std::sqrt(float(dim));
    std::vector<std::int64_t> tables, blocks, offsets, lengths{kLength, 5, 66};
    for (int i = 0; i < kSequences * kTable; ++i) tables.push_back((i % kTable * 7 + 3) % kBlocks);
    for (int i = 0; i < kLength; ++i) blocks.push_back(tables[i / kBlock]), offsets.push_back(i % kBlock);

    Numbers keys = random_numbers(kLength * kHeads * dim);
    Numbers values = random_numbers(kLength * kHeads * dim);
    Numbers kv(kBlocks * kLayers * 2 * kHeads * kBlock * dim);
    baton_write_kv(kv, kLayers, kHeads, kBlock, dim, kLayer, keys, kHeads * dim, values,
                   kHeads * dim, blocks.data(), offsets.data(), kLength, threads);

    Numbers queries = random_numbers(kTokens * kHeads * kGroup * dim), dst(queries.count);
    baton_attend_chunk(kv, kLayers, kHeads, kBlock, dim, kLayer, queries, dst, tables.data(),
                       kTokens, kLength, window, kGroup, scale, threads);
    print_bits("chunk", dst);
    Numbers singles(kSequences * kHeads * kGroup * dim);
    baton_attend_singles(kv, kLayers, kHeads, kBlock, dim, kLayer, queries, singles, tables.data(),
                         kTable, lengths.data(), window, kSequences, kGroup, scale, threads);
    print_bits("singles", singles);

    Numbers cosines = random_numbers(kTokens * dim, 0.7f), sines = random_numbers(kTokens * dim, 0.7f);
    Numbers weight = random_numbers(dim);
    baton_rotate(queries, kHeads * kGroup * dim, weight, cosines, sines, dst, kTokens,
                 kHeads * kGroup, dim, 1e-6f, threads);
    print_bits("rotate", dst);
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
            run_elementwise(tokens, 96, threads);
            run_elementwise(tokens, 258, threads);
            find_peaks(tokens, 999, threads);
        }
        for (const std::int64_t dim : {32, 128})
            for (const std::int64_t window : {0, 20}) attend(dim, window, threads);
    }
}
