// Prints the results of every kernel on random numbers, one line of bits per call. Builds of this
// program for two architectures must print the same, up to rounding.

#include "abi.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <vector>

using namespace baton;

namespace {

// Zeroed and aligned to a cache line.
struct alignas(64) Line {
    std::uint8_t bytes[64] = {};
};

struct AlignedBuffer {
    std::vector<Line> lines;
    explicit AlignedBuffer(std::int64_t num_bytes) : lines(num_bytes / 64 + 1) {}
    template <typename Number>
    Number* as() {
        return reinterpret_cast<Number*>(lines.data());
    }
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

std::vector<float> wide_numbers(std::int64_t count) {
    std::vector<float> numbers(count);
    for (auto& number : numbers) number = normal();
    return numbers;
}

void print_bits(const char* kernel, Numbers& numbers) {
    std::printf("%s", kernel);
    for (std::int64_t i = 0; i < numbers.count; ++i)
        std::printf(" %04x", numbers.buffer.as<std::uint16_t>()[i]);
    std::puts("");
}

void print_indices(const char* kernel, const std::vector<std::int64_t>& indices) {
    std::printf("%s", kernel);
    for (const auto index : indices) std::printf(" %04x", unsigned(index));
    std::puts("");
}

// Packs random weights in the format of `matrix`, and returns the memory that it then points to.
AlignedBuffer pack_weights(PackedMatrix& matrix, int threads) {
    AlignedBuffer packed(baton_packed_bytes(&matrix));
    matrix.packed = packed.as<void>();
    const std::int64_t count = matrix.num_rows * matrix.num_columns;
    if (matrix.bits == 16) {
        Numbers weights = random_numbers(count, 0.1f);
        const PackArgs pack{
            .matrix = matrix, .weights = weights.buffer.as<void>(), .num_threads = threads};
        baton_pack(&pack);
        return packed;
    }
    const int num_codes = 1 << matrix.bits;
    const std::int64_t row_groups =
        (matrix.num_columns + matrix.group_size - 1) / matrix.group_size;
    std::vector<std::uint8_t> weights(count), zeros(matrix.num_rows * row_groups, num_codes / 2);
    std::vector<float> scales(zeros.size());
    for (auto& weight : weights) weight = std::uint8_t(uniform() * float(num_codes));
    for (auto& scale : scales)
        scale =
            matrix.is_mxfp4 ? std::ldexp(1.0f, -3 - int(uniform() * 5)) : 0.01f * (1 + uniform());
    std::vector<std::uint16_t> halves(zeros.size());
    for (auto& half : halves) half = std::uint16_t(0x2000 + uniform() * 0x100);
    std::vector<std::uint16_t> offsets(zeros.size());
    for (auto& offset : offsets) offset = std::uint16_t(0xa200 + uniform() * 0x100);
    std::vector<std::int8_t> multiples(zeros.size());  // of steps
    for (auto& multiple : multiples) multiple = std::int8_t(64 - uniform() * 128);
    const bool has_steps = matrix.scale_type == ScaleType::kSteps;
    const auto stored = [&](std::vector<std::uint16_t>& numbers) -> const void* {
        if (has_steps) return multiples.data();
        return numbers.data();
    };
    const bool is_float32 = matrix.scale_type == ScaleType::kFloat32;
    const PackArgs pack{
        .matrix = matrix,
        .weights = weights.data(),
        .scales = is_float32 ? static_cast<const void*>(scales.data()) : stored(halves),
        .zeros = matrix.has_offsets || matrix.is_centred ? nullptr : zeros.data(),
        .offsets = matrix.has_offsets ? stored(offsets) : nullptr,
        .scale_steps = has_steps ? halves.data() : nullptr,
        .offset_steps = has_steps ? offsets.data() : nullptr,
        .num_threads = threads,
    };
    baton_pack(&pack);
    return packed;
}

void multiply(const char* kernel, PackedMatrix matrix, std::int64_t tokens, int threads) {
    Numbers src = random_numbers(tokens * matrix.num_columns);
    Numbers bias = random_numbers(matrix.num_rows), dst(tokens * matrix.num_rows);
    matrix.bias = bias;
    const AlignedBuffer packed = pack_weights(matrix, threads);
    const LinearArgs linear{matrix, src, dst, tokens, threads};
    baton_linear(&linear);
    print_bits(kernel, dst);
}

PackedMatrix bf16_matrix(std::int64_t rows, std::int64_t columns) {
    return {nullptr, nullptr, 16, rows, columns, 0, 0, ScaleType::kFloat32};
}

PackedMatrix mxfp4_matrix(std::int64_t rows, std::int64_t columns) {
    return {nullptr, nullptr, 4, rows, columns, 32, 1, ScaleType::kFloat32};
}

// Experts of a layer, packed.
struct Experts {
    std::vector<AlignedBuffer> buffers;
    std::vector<PackedMatrix> matrices;

    Experts(std::int64_t count, PackedMatrix matrix) {
        for (std::int64_t i = 0; i < count; ++i) {
            buffers.push_back(pack_weights(matrix, 1));
            matrices.push_back(matrix);
        }
    }
};

void multiply_heads(std::int64_t tokens, std::int64_t rows, std::int64_t columns, int threads) {
    constexpr std::int64_t kHeads = 5;
    const Experts heads(kHeads, bf16_matrix(rows, columns));
    Numbers src = random_numbers(kHeads * tokens * columns), dst(kHeads * tokens * rows);
    const HeadLinearArgs args{heads.matrices.data(), src, dst, kHeads, tokens, threads};
    baton_head_linear(&args);
    print_bits("heads", dst);
}

using MatrixOf = PackedMatrix (*)(std::int64_t rows, std::int64_t columns);

void mix(const char* kernel, MatrixOf matrix_of, std::int64_t tokens, std::int64_t hidden_size,
         Scoring scoring, int threads) {
    constexpr std::int64_t kExperts = 12, kTop = 3, kSize = 40;
    const std::int64_t num_rows = tokens * kTop;
    const std::vector<float> router = wide_numbers(kExperts * hidden_size);
    const std::vector<float> bias = wide_numbers(kExperts);
    Numbers src = random_numbers(tokens * hidden_size, 0.2f), dst(src.count);
    std::vector<std::int64_t> expert_ids(num_rows);
    std::vector<float> weights(num_rows);
    const RouteArgs route{
        .router = router.data(),
        .bias = bias.data(),
        .src = src,
        .expert_ids = expert_ids.data(),
        .weights = weights.data(),
        .num_tokens = tokens,
        .hidden_size = hidden_size,
        .num_experts = kExperts,
        .top_k = kTop,
        .num_groups = 2,
        .top_groups = 1,
        .group_best = 2,
        .scale = 1.5f,
        .scoring = scoring,
        .normalizes = true,
        .num_threads = threads,
    };
    baton_route(&route);
    print_indices("route", expert_ids);
    const Experts gate_up(kExperts, matrix_of(2 * kSize, hidden_size));
    const Experts down(kExperts, matrix_of(hidden_size, kSize));
    Numbers narrow(num_rows * hidden_size), wide(num_rows * 2 * kSize), gated(num_rows * kSize);
    const MixArgs mix{
        .gate_up = gate_up.matrices.data(),
        .down = down.matrices.data(),
        .src = src,
        .expert_ids = expert_ids.data(),
        .weights = weights.data(),
        .dst = dst,
        .narrow_buf = narrow,
        .wide_buf = wide,
        .gated_buf = gated,
        .num_tokens = tokens,
        .num_experts = kExperts,
        .top_k = kTop,
        .gate = {GateKind::kSilu, 0, 0},
        .num_threads = threads,
    };
    baton_mix_experts(&mix);
    print_bits(kernel, dst);
}

void run_elementwise(std::int64_t tokens, std::int64_t size, int threads) {
    Numbers src = random_numbers(tokens * size), weight = random_numbers(size);
    Numbers other = random_numbers(tokens * size);
    Numbers normed(tokens * size), gated(tokens * (size / 2));
    RmsNormArgs norm{
        .src = src,
        .norm = {weight, 1e-6f, false},
        .dst = normed,
        .num_rows = tokens,
        .size = size,
        .src_stride = size,
        .dst_stride = size,
        .num_threads = threads,
    };
    baton_rms_norm(&norm);
    print_bits("norm", normed);
    GateArgs gate{
        .src = src,
        .dst = gated,
        .num_tokens = tokens,
        .size = size / 2,
        .gate = {GateKind::kSilu, 1.7f, 1.5f},
        .num_threads = threads,
    };
    baton_gate(&gate);
    print_bits("gate", gated);
    baton_add(src, other, tokens * size, 1, threads);
    print_bits("add", src);

    const std::vector<float> wide = wide_numbers(size);
    norm.norm = {wide.data(), 1e-6f, true};
    baton_rms_norm(&norm);
    print_bits("norm32", normed);
    gate.gate.kind = GateKind::kGeluTanh;
    baton_gate(&gate);
    print_bits("gelu", gated);
    gate.gate.kind = GateKind::kClampedSwiglu;
    baton_gate(&gate);
    print_bits("clamped", gated);
    baton_add(src, other, tokens * size, 0.22f, threads);
    print_bits("scaled", src);
    LayerNormArgs layer_norm{
        .src = src,
        .norm = {wide.data(), nullptr, 1e-6f},
        .dst = normed,
        .num_rows = tokens,
        .size = size / 16 * 16,
        .num_threads = threads,
    };
    baton_layer_norm(&layer_norm);
    print_bits("layer norm", normed);
    GeluArgs gelu{
        .src = src,
        .dst = normed,
        .count = tokens * size / 16 * 16,
        .is_exact = 1,
        .num_threads = threads,
    };
    baton_gelu(&gelu);
    print_bits("exact gelu", normed);
}

// Adds low-rank products to the outputs of some tokens, in groups with parts of different ranks,
// which begin at different rows.
void add_low_rank(std::int64_t tokens, std::int64_t columns, std::int64_t rows, int threads) {
    struct Shape {
        std::int64_t group, rank, first_row, num_rows;
    };
    const std::int64_t third = rows / 3;
    const Shape shapes[] = {
        {0, 1, 0, rows},
        {1, 5, 0, third},
        {1, 16, third, rows - third},
        {2, 33, third + 1, third},
    };
    std::vector<Numbers> buffers;
    std::vector<LowRankPart> parts;
    for (const auto& shape : shapes) {
        Numbers& down = buffers.emplace_back(random_numbers(shape.rank * columns, 0.2f));
        const Bf16* const down_numbers = down;
        Numbers& up = buffers.emplace_back(random_numbers(shape.rank * shape.num_rows, 0.2f));
        parts.push_back({down_numbers, up, shape.rank, shape.first_row, shape.num_rows});
    }
    // Each adapter has parts at the second of two places alone.
    const LowRankPlace places[3][2] = {
        {{}, {&parts[0], 1}}, {{}, {&parts[1], 2}}, {{}, {&parts[3], 1}}};
    const LowRankAdapter adapters[] = {{places[0]}, {places[1]}, {places[2]}};
    // Every fourth token has no adapter, and a group can be empty.
    std::vector<std::int64_t> indices, first_tokens{0};
    std::int64_t num_hidden = 0;
    for (std::int64_t group = 0; group < 3; ++group) {
        for (std::int64_t token = group; token < tokens; token += 4) indices.push_back(token);
        const std::int64_t count = std::int64_t(indices.size()) - first_tokens.back();
        first_tokens.push_back(indices.size());
        for (const auto& shape : shapes)
            num_hidden += shape.group == group ? shape.rank * count : 0;
    }
    Numbers src = random_numbers(tokens * columns), dst = random_numbers(tokens * rows);
    std::vector<float> hidden(num_hidden);
    const LowRankArgs args{
        .groups = {adapters, first_tokens.data(), indices.data(), 3},
        .src = src,
        .dst = dst,
        .hidden_buf = hidden.data(),
        .place = 1,
        .num_columns = columns,
        .num_rows = rows,
        .num_threads = threads,
    };
    baton_add_low_rank(&args);
    print_bits("low-rank", dst);
}

void find_maxima(std::int64_t tokens, std::int64_t size, int threads) {
    const std::vector<float> logits = wide_numbers(tokens * size);
    std::vector<std::int64_t> indices(tokens);
    AlignedBuffer are_finite(tokens);
    const ArgmaxArgs argmax{logits.data(), indices.data(), are_finite.as<bool>(),
                            tokens,        size,           threads};
    baton_argmax(&argmax);
    print_indices("argmax", indices);
}

// Without values if value_dim is less than dim.
void attend(std::int64_t dim, std::int64_t value_dim, AttentionParams params, int threads,
            bool is_int8 = false) {
    constexpr std::int64_t kLayers = 2, kLayer = 1, kKvHeads = 2, kHeads = 8, kBlock = 16,
                           kBlocks = 12;
    constexpr std::int64_t kLength = 150, kTokens = 37, kSequences = 3, kTable = 10, kFirst = 0;
    params.scale = 1 / std::sqrt(float(dim));
    std::vector<std::int64_t> tables, blocks, offsets, lengths{kLength, 5, 66};
    for (int i = 0; i < kSequences * kTable; ++i) tables.push_back((i % kTable * 7 + 3) % kBlocks);
    for (int i = 0; i < kLength; ++i)
        blocks.push_back(tables[i / kBlock]), offsets.push_back(i % kBlock);

    Numbers keys = random_numbers(kLength * kKvHeads * dim);
    Numbers values = random_numbers(kLength * kKvHeads * dim);
    Numbers cache(kBlocks * kLayers * 2 * kKvHeads * kBlock * dim);
    const PagedKv kv{cache,     kLayers, value_dim < dim ? 1 : 2, kKvHeads, kBlock, dim,
                     value_dim, is_int8};
    BatchLayout batch{};
    batch.write_blocks = blocks.data(), batch.write_offsets = offsets.data();
    batch.block_tables = tables.data(), batch.context_lens = lengths.data();
    batch.query_starts = &kFirst, batch.num_queries = &kTokens;
    batch.table_stride = kTable, batch.num_tokens = kLength;
    const WriteKvArgs write{
        .kv = kv,
        .batch = batch,
        .keys = keys,
        .values = values,
        .layer = kLayer,
        .key_stride = kKvHeads * dim,
        .value_stride = kKvHeads * dim,
        .num_threads = threads,
    };
    baton_write_kv(&write);

    Numbers queries = random_numbers(kTokens * kHeads * dim), dst(queries.count);
    Numbers chunk_dst(kTokens * kHeads * value_dim);
    batch.num_sequences = 1;
    AttentionArgs args{
        .kv = kv,
        .batch = batch,
        .params = params,
        .queries = queries,
        .dst = chunk_dst,
        .layer = kLayer,
        .num_heads = kHeads,
        .num_threads = threads,
    };
    baton_attention(&args);
    print_bits("chunk", chunk_dst);
    const std::vector<std::int64_t> ends(kTokens, kLength);
    args.batch.seen_ends = ends.data();  // of a picture, whose tokens see each other
    baton_attention(&args);
    print_bits("picture", chunk_dst);
    args.batch.seen_ends = nullptr;
    Numbers single_dst(kSequences * kHeads * value_dim);
    args.batch.num_sequences = args.batch.num_single = kSequences;
    args.dst = single_dst;
    baton_attention(&args);
    print_bits("singles", single_dst);

    Numbers cosines = random_numbers(kTokens * dim, 0.7f),
            sines = random_numbers(kTokens * dim, 0.7f);
    Numbers weight = random_numbers(dim);
    RopeArgs rope{
        .src = queries,
        .norm = {weight, 1e-6f, false},
        .angles = {cosines, sines},
        .dst = dst,
        .src_stride = kHeads * dim,
        .num_tokens = kTokens,
        .num_heads = kHeads,
        .head_dim = dim,
        .num_threads = threads,
    };
    baton_rope(&rope);
    print_bits("rope", dst);
    const std::vector<float> wide = wide_numbers(dim);
    rope.norm = {wide.data(), 1e-6f, true};
    baton_rope(&rope);
    print_bits("rope32", dst);
}

// Runs a recurrent layer over two sequences: one continues from a state, in two runs, and the other
// begins.
template <typename Args, typename Call>
void recur(const char* kernel, Args args, std::int64_t gates_of_head, Call call) {
    constexpr std::int64_t kTokens = 12, kRowsPerBlock = 16;
    const std::int64_t num_keys = args.num_key_heads * args.key_dim;
    const std::int64_t num_values = args.num_value_heads * args.value_dim;
    const std::int64_t channels = 2 * num_keys + num_values, num_kept = args.conv_size - 1;
    const std::int64_t row_bytes = args.value_dim * sizeof(float);
    const std::int64_t matrix_rows = args.num_value_heads * args.key_dim;
    const std::int64_t inputs_bytes = num_kept * channels * sizeof(Bf16);
    const std::int64_t rows = matrix_rows + (inputs_bytes + row_bytes - 1) / row_bytes;
    const std::int64_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
    constexpr std::int64_t kStates = 4;
    AlignedBuffer states(kStates * blocks * kRowsPerBlock * row_bytes);
    const std::vector<float> matrices = wide_numbers(matrix_rows * args.value_dim);
    Numbers inputs = random_numbers(num_kept * channels);
    std::memcpy(states.as<char>(), matrices.data(), matrix_rows * row_bytes);
    std::memcpy(states.as<char>() + matrix_rows * row_bytes, inputs.buffer.as<char>(),
                inputs_bytes);
    // The states before and after each run. A negative block is a state of zeros.
    const std::int64_t first_tokens[] = {0, 5, 8}, counts[] = {5, 3, 4}, first_runs[] = {0, 2};
    std::vector<std::int64_t> reads, writes;
    for (const std::int64_t state : {0, 1, -1})
        for (std::int64_t i = 0; i < blocks; ++i)
            reads.push_back(state < 0 ? -1 : state * blocks + i);
    for (const std::int64_t state : {1, 2, 3})
        for (std::int64_t i = 0; i < blocks; ++i) writes.push_back(state * blocks + i);

    Numbers projected = random_numbers(kTokens * (channels + num_values));
    Numbers gates = random_numbers(kTokens * args.num_value_heads * gates_of_head);
    Numbers dst(kTokens * num_values), inputs_buf(2 * num_kept * channels);
    const std::vector<float> conv = wide_numbers(args.conv_size * channels);
    std::vector<float> mixed_buf(kTokens * channels), gates_buf(kTokens * args.num_value_heads * 2);
    args.states = {states.as<char>(), kRowsPerBlock * row_bytes, row_bytes, kRowsPerBlock};
    args.runs = {first_tokens, counts, reads.data(), writes.data(), first_runs, blocks, 3, 2,
                 kTokens};
    args.projected = projected;
    args.gates = gates;
    args.conv = conv.data();
    args.dst = dst;
    args.inputs_buf = inputs_buf;
    args.mixed_buf = mixed_buf.data();
    if constexpr (!std::is_same_v<Args, ShortConvArgs>) args.gates_buf = gates_buf.data();
    call(args);
    print_bits(kernel, dst);
    // The states of Mamba2 differ by a step between architectures: a sum of two products can be
    // rounded after either of them.
    if (std::is_same_v<Args, MambaArgs>) return;
    Numbers written(kStates * blocks * kRowsPerBlock * row_bytes / sizeof(Bf16));
    std::memcpy(written.buffer.as<char>(), states.as<char>(), written.count * sizeof(Bf16));
    print_bits(kernel, written);
}

void recur(std::int64_t value_dim, int threads) {
    constexpr std::int64_t kKeyHeads = 2, kValueHeads = 4, kKeyDim = 16, kConvSize = 4;
    const std::vector<float> bias = wide_numbers(kValueHeads), skip = wide_numbers(kValueHeads);
    std::vector<float> rates(kValueHeads);
    for (auto& rate : rates) rate = 0.1f + uniform();
    Numbers weight = random_numbers(2 * value_dim);
    DeltaArgs delta{};
    delta.decay_bias = bias.data();
    delta.decay_rate = rates.data();
    delta.norm = {weight, 1e-6f, false};
    delta.strength_scale = 1.0f;
    MambaArgs mamba{};
    const std::vector<float> conv_bias =
        wide_numbers(2 * kKeyHeads * kKeyDim + kValueHeads * value_dim);
    std::vector<float> outputs_buf(12 * kValueHeads * value_dim);
    Numbers group_weight = random_numbers(kValueHeads * value_dim);
    mamba.conv_bias = conv_bias.data();
    mamba.step_bias = bias.data();
    mamba.decay_rate = rates.data();
    mamba.skip = skip.data();
    mamba.norm = {group_weight, 1e-6f, false};
    const auto size = [&](auto& args) {
        args.outputs_buf = outputs_buf.data();
        args.num_key_heads = kKeyHeads;
        args.num_value_heads = kValueHeads;
        args.key_dim = kKeyDim;
        args.value_dim = value_dim;
        args.conv_size = kConvSize;
        args.num_threads = threads;
    };
    size(delta);
    size(mamba);
    recur("delta", delta, 2, [](const DeltaArgs& args) { baton_delta(&args); });
    recur("mamba", mamba, 1, [](const MambaArgs& args) { baton_mamba(&args); });
    ShortConvArgs conv{};
    conv.num_key_heads = conv.num_value_heads = 1;
    conv.value_dim = value_dim;
    conv.conv_size = kConvSize;
    conv.num_threads = threads;
    recur("short_conv", conv, value_dim,
          [](const ShortConvArgs& args) { baton_short_conv(&args); });
}

}  // namespace

int main() {
    for (const int threads : {1, 2}) {
        for (const std::int64_t tokens : {1, 3, 7, 33}) {
            multiply("linear", bf16_matrix(64, 32), tokens, threads);
            multiply("linear", bf16_matrix(200, 96), tokens, threads);
            multiply("linear", bf16_matrix(130, 258), tokens, threads);
            multiply("int8", {nullptr, nullptr, 8, 130, 256, 256, 0}, tokens, threads);
            multiply("int4", {nullptr, nullptr, 4, 200, 96, 32, 0}, tokens, threads);
            for (const auto type : {ScaleType::kBfloat16, ScaleType::kFloat16}) {
                multiply("int4", {nullptr, nullptr, 4, 200, 96, 32, 0, type}, tokens, threads);
                for (const std::int64_t bits : {4, 8})
                    multiply("offsets", {nullptr, nullptr, bits, 200, 96, 32, 0, type, 1}, tokens,
                             threads);
                multiply("activations8", {nullptr, nullptr, 6, 200, 96, 16, 0, type, 0, 0, 8},
                         tokens, threads);
                for (const std::int32_t has_offsets : {0, 1})
                    multiply("activations8",
                             {nullptr, nullptr, 4, 200, 96, 32, 0, type, has_offsets, 0, 8}, tokens,
                             threads);
                multiply("activations8", {nullptr, nullptr, 4, 200, 96, 32, 0, type, 0, 1, 8},
                         tokens, threads);
            }
            for (const std::int64_t bits : {4, 6})
                multiply("activations8",
                         {nullptr, nullptr, bits, 200, 320, 32, 0, ScaleType::kSteps, 1, 0, 8},
                         tokens, threads);
            multiply("activations8",
                     {nullptr, nullptr, 6, 200, 320, 16, 0, ScaleType::kSteps, 0, 1, 8}, tokens,
                     threads);
            PackedMatrix by_bytes = mxfp4_matrix(200, 96);
            by_bytes.activation_bits = 8;
            multiply("activations8", by_bytes, tokens, threads);
            multiply("mxfp4", mxfp4_matrix(200, 96), tokens, threads);
            multiply("mxfp4", mxfp4_matrix(130, 80), tokens, threads);
            run_elementwise(tokens, 96, threads);
            run_elementwise(tokens, 258, threads);
            find_maxima(tokens, 999, threads);
            add_low_rank(tokens, 64, 300, threads);
            add_low_rank(tokens, 90, 530, threads);
            multiply_heads(tokens, 130, 96, threads);
            mix("experts", bf16_matrix, tokens, 96, Scoring::kSoftmax, threads);
            mix("experts", bf16_matrix, tokens, 70, Scoring::kSigmoid, threads);
            mix("mxfp4-experts", mxfp4_matrix, tokens, 96, Scoring::kSoftmaxOfTop, threads);
        }
        for (const std::int64_t value_dim : {32, 72}) recur(value_dim, threads);
        const float sinks[8] = {-2, -1, 0, 1, 2, 3, 4, 5};
        for (const std::int64_t dim : {32, 128}) {
            attend(dim, dim, {}, threads);
            attend(dim, dim - 8, {}, threads);
            attend(dim, dim, {.window = 20}, threads);
            attend(dim, dim, {.sinks = sinks, .window = 20, .softcap = 2}, threads);
            attend(dim, dim, {.sinks = sinks, .chunk = 24}, threads);
            attend(dim, dim, {.chunk = 24, .softcap = 2}, threads);
            attend(dim, dim, {.window = 20}, threads, true);
        }
    }
}
