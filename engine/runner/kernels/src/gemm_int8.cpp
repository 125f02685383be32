// GEMM with weights of 4 or 6 bits and activations of 8 bits.
//
// Blocks of 32 activations have a common scale, as groups of weights have; of 16, if groups have 16
// columns. The sum of a block's products is an exact integer, in any order; blocks are then added
// as float32 in the order of the columns. So a token has the same bits in any batch.

#include "gemm.h"
#include "thread_pool.h"

#if defined(__AVX2__) && !defined(__AVX512BF16__)
#include "int8_dots_avx2.h"
#else
#include "int8_dots_vectors.h"
#endif

namespace baton::int8_activations {

namespace {

// Steps of the scales and offsets of a panel's rows.
template <NumberFormat FORMAT, ScaleType SCALE>
struct Steps {
    void load(const std::uint8_t*) {}
};

template <NumberFormat FORMAT>
struct Steps<FORMAT, ScaleType::kSteps> {
    F32x16 scales[kVectors], offsets[kVectors];

    void load(const std::uint8_t* steps) {
        constexpr auto kType = ScaleType::kFloat16;
        for (int v = 0; v < kVectors; ++v) {
            scales[v] = load_scales<kType>(steps, v);
            if constexpr (has_offsets(FORMAT)) offsets[v] = load_scales<kType>(steps, kVectors + v);
        }
    }
};

// Scales of a group's rows, and what is added to their numbers times these. Centred numbers are
// multiplied without their zero point.
template <bool IS_CENTRED>
struct GroupHeader {
    alignas(64) float scales[kPanelRows], offsets[IS_CENTRED ? 0 : kPanelRows];
};

template <NumberFormat FORMAT, ScaleType SCALE>
struct LoadedHeader : GroupHeader<is_centred(FORMAT)> {
    LoadedHeader(const std::uint8_t* group, const Steps<FORMAT, SCALE>& steps) {
        for (int v = 0; v < kVectors; ++v) {
            const F32x16 scale = scale_of(group, steps, v);
            std::memcpy(this->scales + v * kLanes, &scale, sizeof scale);
            if constexpr (!is_centred(FORMAT)) {
                const F32x16 offset = offset_of(group, scale, steps, v);
                std::memcpy(this->offsets + v * kLanes, &offset, sizeof offset);
            }
        }
    }

  private:
    static F32x16 stepped(const std::uint8_t* bytes, int v) {
        return to_f32(sign_extend(reinterpret_cast<const std::int8_t*>(bytes) + v * kLanes));
    }

    static F32x16 scale_of(const std::uint8_t* group, const Steps<FORMAT, SCALE>& steps, int v) {
        if constexpr (FORMAT == NumberFormat::kMxfp4) return load_mxfp4_scales(group, v);
        if constexpr (SCALE == ScaleType::kSteps) return stepped(group, v) * steps.scales[v];
        if constexpr (SCALE != ScaleType::kSteps) return load_scales<SCALE>(group, v);
    }

    static F32x16 offset_of(const std::uint8_t* group, F32x16 scale,
                            const Steps<FORMAT, SCALE>& steps, int v) {
        const auto* const after = group + zeros_offset_of(FORMAT, SCALE);
        if constexpr (FORMAT == NumberFormat::kMxfp4) return scale * float(-kFp4Zero);
        if constexpr (!has_offsets(FORMAT))
            return -scale * to_f32((I32x16)zero_extend(after + v * kLanes));
        if constexpr (SCALE == ScaleType::kSteps) return stepped(after, v) * steps.offsets[v];
        if constexpr (SCALE != ScaleType::kSteps) return load_scales<SCALE>(after, v);
    }
};

// The tokens from `first` up to `end` times a matrix.
template <int COLUMNS>
struct Gemm {
    QuantizedLayout layout;
    const PackedMatrix& matrix;
    const ActivationBlock<COLUMNS>* blocks;  // [tokens, blocks of columns]
    Bf16* dst;                               // [tokens, rows]
    std::int64_t first, end;

    std::int64_t blocks_per_group() const { return layout.padded_group() / COLUMNS; }
    std::int64_t num_blocks() const { return layout.num_groups() * blocks_per_group(); }
    const ActivationBlock<COLUMNS>* token(std::int64_t index) const {
        return blocks + index * num_blocks();
    }
};

// The format of the same numbers with zero points.
constexpr NumberFormat without_offsets(NumberFormat format) {
    using enum NumberFormat;
    return format == kInt4Offsets ? kInt4 : format == kInt6Offsets ? kInt6 : format;
}

template <NumberFormat FORMAT, int COLUMNS>
constexpr std::int64_t block_bytes = kPanelRows * COLUMNS * bits_of(FORMAT) / 8;

constexpr std::int64_t kPassTokens = 32;  // their sums stay in L1
using Sums = float[kPassTokens][kPanelRows];

// Adds the dot products of a token with kRows rows, from row `at` of a panel on.
template <NumberFormat FORMAT, typename Block>
inline void add_dots(float* sums, Integers dots, const Block& block,
                     const GroupHeader<is_centred(FORMAT)>& header, int at) {
    Floats total = load_floats(sums + at);
    if constexpr (is_centred(FORMAT)) dots = minus(dots, centre_of(FORMAT) * block.total);
    total = multiply_add(total, scaled(dots, block.scale), load_floats(header.scales + at));
    if constexpr (!is_centred(FORMAT))
        total = multiply_add(total, load_floats(header.offsets + at), block.sum);
    std::memcpy(sums + at, &total, sizeof total);
}

// Prefetches what follows weights.
inline void prefetch(const std::uint8_t* weights, std::int64_t num_bytes) {
    constexpr int kAheadBytes = 8192, kLineBytes = 64;
    for (std::int64_t at = 0; at < num_bytes; at += kLineBytes)
        __builtin_prefetch(weights + kAheadBytes + at, 0, 2);
}

// Multiplies a block of one token: hardware prefetches all that it reads.
template <NumberFormat FORMAT, typename Block>
BATON_BLOCK void multiply_one(float* sums, const std::uint8_t* words, const Block& block,
                              const GroupHeader<is_centred(FORMAT)>& header) {
    Integers dots[kPanelRows / kRows];
    dot_panel<FORMAT>(dots, words, block);
#pragma GCC unroll kUnroll
    for (int at = 0; at < kPanelRows; at += kRows)
        add_dots<FORMAT>(sums, dots[at / kRows], block, header, at);
}

// Multiplies a block of several tokens, of which one follows the other after `stride` blocks. The
// weights of a few rows stay in registers meanwhile, so blocks are not read in ascending order.
template <NumberFormat FORMAT, int COLUMNS>
BATON_BLOCK void multiply_several(Sums& sums, const std::uint8_t* words,
                                  const ActivationBlock<COLUMNS>* blocks, std::int64_t stride,
                                  std::int64_t num_tokens,
                                  const GroupHeader<is_centred(FORMAT)>& header) {
    prefetch(words, block_bytes<FORMAT, COLUMNS>);
#pragma GCC unroll kUnroll
    for (int at = 0; at < kPanelRows; at += kRows) {
        const Weights<FORMAT, COLUMNS> weights(words + at * sizeof(std::uint32_t));
        for (std::int64_t t = 0; t < num_tokens; ++t) {
            const ActivationBlock<COLUMNS>& block = blocks[t * stride];
            add_dots<FORMAT>(sums[t], weights.dot(block), block, header, at);
        }
    }
}

// Multiplies up to kPassTokens tokens by a panel.
template <NumberFormat FORMAT, ScaleType SCALE, int COLUMNS>
void multiply_pass(const Gemm<COLUMNS>& p, std::int64_t panel, std::int64_t first,
                   std::int64_t num_tokens) {
    alignas(64) Sums sums;
    std::memset(sums, 0, sizeof sums[0] * num_tokens);
    const ActivationBlock<COLUMNS>* blocks = p.token(first);
    const std::int64_t stride = p.num_blocks();
    const auto* words = static_cast<const std::uint8_t*>(p.matrix.packed);
    words += panel * p.layout.panel_bytes();
    Steps<FORMAT, SCALE> steps;
    for (std::int64_t group = 0; group < p.layout.num_groups(); ++group) {
        if (group * p.layout.group_size % kStepColumns == 0) {
            steps.load(words);
            words += step_bytes_of(FORMAT, SCALE);
        }
        if (num_tokens > 1) prefetch(words, header_bytes_of(FORMAT, SCALE));
        const LoadedHeader<FORMAT, SCALE> header(words, steps);
        // The hardware prefetcher expects ascending addresses, so the header is read first.
        if constexpr (SCALE == ScaleType::kSteps) asm volatile("" ::: "memory");
        words += header_bytes_of(FORMAT, SCALE);
        for (std::int64_t i = 0; i < p.blocks_per_group(); ++i, ++blocks) {
            constexpr NumberFormat kNumbers = without_offsets(FORMAT);
            if (num_tokens == 1)
                multiply_one<kNumbers>(sums[0], words, *blocks, header);
            else
                multiply_several<kNumbers>(sums, words, blocks, stride, num_tokens, header);
            words += block_bytes<FORMAT, COLUMNS>;
        }
    }
    for (std::int64_t t = 0; t < num_tokens; ++t) {
        F32x16 rows[kVectors];
        std::memcpy(rows, sums[t], sizeof rows);
        store_row(rows, p.matrix.bias, p.dst + (first + t) * p.layout.num_rows, panel,
                  p.layout.num_rows);
    }
}

template <NumberFormat FORMAT, ScaleType SCALE, int COLUMNS>
void multiply_panel(const Gemm<COLUMNS>& p, std::int64_t panel) {
    for (std::int64_t first = p.first; first < p.end; first += kPassTokens)
        multiply_pass<FORMAT, SCALE>(p, panel, first, std::min(kPassTokens, p.end - first));
}

template <int COLUMNS>
using MultiplyPanel = void (*)(const Gemm<COLUMNS>&, std::int64_t);

template <int COLUMNS>
MultiplyPanel<COLUMNS> multiply_of(const QuantizedLayout& layout) {
    constexpr auto choose = []<NumberFormat FORMAT, ScaleType SCALE>() -> MultiplyPanel<COLUMNS> {
        return multiply_panel<FORMAT, SCALE, COLUMNS>;
    };
    using enum NumberFormat;
    const bool has_steps = layout.scale_type == ScaleType::kSteps;
    if constexpr (COLUMNS == 16) {
        if (has_steps && layout.format == kInt6Offsets)
            return multiply_panel<kInt6Offsets, ScaleType::kSteps, COLUMNS>;
        if (has_steps) return multiply_panel<kInt6Centred, ScaleType::kSteps, COLUMNS>;
        return choose_among<kInt6, kInt6Offsets, kInt6Centred>(layout, choose);
    }
    if (has_steps && layout.bits == 4)
        return multiply_panel<kInt4Offsets, ScaleType::kSteps, COLUMNS>;
    if (has_steps) return multiply_panel<kInt6Offsets, ScaleType::kSteps, COLUMNS>;
    return choose_among<kInt4, kInt4Offsets, kMxfp4, kInt6, kInt6Offsets, kInt6Centred,
                        kInt4Centred>(layout, choose);
}

template <int COLUMNS>
void multiply(const GroupedLinear& args, const QuantizedLayout& layout) {
    thread_local std::vector<ActivationBlock<COLUMNS>> buffer;
    // Captured by reference: all threads use the buffer of the calling thread.
    std::vector<ActivationBlock<COLUMNS>>& blocks = buffer;
    const std::int64_t per_token = layout.padded_columns() / COLUMNS;
    if (const std::size_t size = args.num_rows() * per_token; blocks.size() < size)
        blocks.resize(size);
    const std::int64_t columns = layout.num_columns;
    parallel_for(
        args.num_rows(), columns, args.num_threads, [&](std::int64_t row, std::int64_t end) {
            for (; row < end; ++row)
                for (std::int64_t i = 0, at = 0; i < per_token; ++i, at += COLUMNS)
                    blocks[row * per_token + i] =
                        quantize_block<COLUMNS>(args.src + row * columns + at,
                                                std::clamp<std::int64_t>(columns - at, 0, COLUMNS));
        });
    const MultiplyPanel<COLUMNS> multiply_panel = multiply_of<COLUMNS>(layout);
    const std::int64_t panels = layout.num_panels();
    WorkQueue queue(args.num_matrices * panels, 1, args.num_threads);
    run_parallel(args.num_threads, [&](int i, int) {
        for (WorkQueue::Unit unit; queue.next(i, unit);) {
            const std::int64_t index = unit.index / panels;
            const Gemm<COLUMNS> gemm{
                layout,   args.matrices[index],    blocks.data(),
                args.dst, args.row_offsets[index], args.row_offsets[index + 1]};
            multiply_panel(gemm, unit.index % panels);
        }
    });
}

}  // namespace

void linear(const GroupedLinear& args) {
    const QuantizedLayout layout(args.matrices[0]);
    layout.group_size % 32 == 0 ? multiply<32>(args, layout) : multiply<16>(args, layout);
}

}  // namespace baton::int8_activations
