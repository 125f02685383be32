// GEMM with weights of 4 or 6 bits and activations of 8 bits.
//
// Blocks of 32 activations have a common scale, as groups of weights have; of 16, if groups have 16
// columns. The sum of a block's products is an exact integer, in any order; blocks are then added
// as float32 in the order of the columns. So a token has the same bits in any batch.

#include "gemm.h"
#include "quantization.h"
#include "thread_pool.h"

namespace baton::int8_activations {

namespace {

constexpr int kMaxInt8 = 127;

// Activations of a token in COLUMNS columns.
template <int COLUMNS>
struct ActivationBlock {
    std::uint32_t quads[COLUMNS / 4];  // of signed bytes
    float scale, sum;                  // sum of the dequantized activations
};

template <int COLUMNS>
ActivationBlock<COLUMNS> quantize_block(const Bf16* activations, std::int64_t count) {
    Bf16 padded[COLUMNS] = {};
    if (count < COLUMNS) {
        std::memcpy(padded, activations, count * sizeof(Bf16));
        activations = padded;
    }
    Bf16 magnitude = 0;  // without sign bits, bit patterns are ordered by magnitude
    for (int i = 0; i < COLUMNS; ++i)
        magnitude = std::max<Bf16>(magnitude, activations[i] & 0x7fff);
    // A non-finite activation makes the scale, and so the whole output row, non-finite.
    const float largest = bf16_to_f32(magnitude);
    ActivationBlock<COLUMNS> block = {
        .quads = {}, .scale = largest / kMaxInt8, .sum = largest * 0.0f};
    if (!(largest > 1e-30f && std::isfinite(largest))) return block;
    typedef std::int8_t Narrow __attribute__((vector_size(kLanes)));
    I32x16 sums = {};
    for (int at = 0; at < COLUMNS; at += kLanes) {
        const F32x16 numbers = bf16_to_f32(activations + at) * (kMaxInt8 / largest);
        const I32x16 whole = round_to_int(numbers);
        const Narrow bytes = __builtin_convertvector(whole, Narrow);
        std::memcpy(block.quads + at / 4, &bytes, sizeof bytes);
        sums += whole;
    }
    int total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
    block.sum = block.scale * float(total);
    return block;
}

// Integers of 8 bits in memory have at most 6 here.
constexpr int max_number_of(NumberFormat format) {
    if (format == NumberFormat::kMxfp4) return 2 * kFp4Zero;
    return bits_of(format) == 4 ? 15 : 63;
}

// Prefetches what follows weights. Blocks are read in strides, which hardware does not expect.
inline void prefetch(const void* weights) {
    constexpr int kAheadBytes = 8192;
    __builtin_prefetch(static_cast<const std::uint8_t*>(weights) + kAheadBytes, 0, 2);
}

#if defined(__AVX2__) && !defined(__AVX512BF16__)

constexpr int kRows = 8;  // rows of a panel that are multiplied at once
using Floats = __m256;
using Integers = __m256i;

Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }
Floats multiply_add(Floats total, Floats left, float right) {
    return _mm256_fmadd_ps(left, _mm256_set1_ps(right), total);
}
Floats scaled(Integers dots, float scale) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(dots), _mm256_set1_ps(scale));
}
Floats multiply_add(Floats total, Floats left, Floats right) {
    return _mm256_fmadd_ps(left, right, total);
}

// The unsigned bytes of eight rows in a block.
template <NumberFormat FORMAT, int COLUMNS>
struct Weights {
    static constexpr int kQuads = COLUMNS / 4;
    __m256i quads[kQuads];

    explicit Weights(const std::uint8_t* words) {
        constexpr int kStep = 8 / bits_of(FORMAT);
        for (int i = 0; i < kQuads; i += kStep, words += kPanelRows * sizeof(std::uint32_t)) {
            prefetch(words);
            const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
            quads[i] = bytes(word);
            if constexpr (kStep == 2) quads[i + 1] = bytes(_mm256_srli_epi16(word, 4));
        }
    }

    Integers dot(const ActivationBlock<COLUMNS>& block) const {
        // So many sums of two products fit into 16 bits.
        constexpr int kStep = max_number_of(FORMAT) == 15 ? 8 : max_number_of(FORMAT) == 63 ? 2 : 4;
        static_assert(kStep * 2 * kMaxInt8 * max_number_of(FORMAT) < 1 << 15);
        __m256i total;
        for (int first = 0; first < kQuads; first += kStep) {
            __m256i pairs = product(block, first);
            for (int i = first + 1; i < first + kStep; ++i)
                pairs = _mm256_add_epi16(pairs, product(block, i));
            const __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            total = first == 0 ? sums : _mm256_add_epi32(total, sums);
        }
        return total;
    }

  private:
    static __m256i bytes(__m256i words) {
        if constexpr (bits_of(FORMAT) == 8) return words;
        const __m256i codes = _mm256_and_si256(words, _mm256_set1_epi8(15));
        return FORMAT == NumberFormat::kMxfp4 ? (__m256i)fp4_bytes((U32x8)codes) : codes;
    }
    __m256i product(const ActivationBlock<COLUMNS>& block, int i) const {
        return _mm256_maddubs_epi16(quads[i], _mm256_set1_epi32(int(block.quads[i])));
    }
};

#else

constexpr int kRows = kLanes;
using Floats = F32x16;
using Integers = I32x16;

Floats load_floats(const float* from) {
    Floats numbers;
    std::memcpy(&numbers, from, sizeof numbers);
    return numbers;
}
Floats multiply_add(Floats total, Floats left, Floats right) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_fmadd_ps((__m512)left, (__m512)right, (__m512)total);
#else
    return total + left * right;
#endif
}
Floats multiply_add(Floats total, Floats left, float right) {
    return multiply_add(total, left, splat(right));
}
Floats scaled(Integers dots, float scale) { return __builtin_convertvector(dots, Floats) * scale; }

// The unsigned bytes of sixteen rows in a block.
template <NumberFormat FORMAT, int COLUMNS>
struct Weights {
    static constexpr int kQuads = COLUMNS / 4;
    U32x16 quads[kQuads];

    explicit Weights(const std::uint8_t* words) {
        constexpr int kStep = 8 / bits_of(FORMAT);
        const auto* from = reinterpret_cast<const U32x16*>(words);
        for (int i = 0; i < kQuads; i += kStep, from += kVectors) {
            prefetch(from);
            quads[i] = bytes(*from);
            if constexpr (kStep == 2) quads[i + 1] = bytes(*from >> 4);
        }
    }

    Integers dot(const ActivationBlock<COLUMNS>& block) const {
        Integers even = {}, odd = {};
        for (int i = 0; i < kQuads; i += 2) {
            dot_add_int8(even, quads[i], block.quads[i]);
            dot_add_int8(odd, quads[i + 1], block.quads[i + 1]);
        }
        return even + odd;
    }

  private:
    static U32x16 bytes(U32x16 words) {
        if constexpr (bits_of(FORMAT) == 8) return words;
        const U32x16 codes = words & 0x0f0f0f0fu;
        return FORMAT == NumberFormat::kMxfp4 ? fp4_bytes(codes) : codes;
    }
};

#endif

// Scales of a group's rows, and what is added to their numbers times these.
template <NumberFormat FORMAT, ScaleType SCALE>
struct GroupHeader {
    alignas(64) float scales[kPanelRows], offsets[kPanelRows];

    explicit GroupHeader(const std::uint8_t* group) {
        const auto* const after = group + zeros_offset_of(FORMAT, SCALE);
        for (int v = 0; v < kVectors; ++v) {
            F32x16 scale, offset;
            if constexpr (FORMAT == NumberFormat::kMxfp4) {
                scale = load_mxfp4_scales(group, v);
                offset = scale * float(-kFp4Zero);
            } else {
                scale = load_scales<SCALE>(group, v);
                if constexpr (has_offsets(FORMAT))
                    offset = load_scales<SCALE>(after, v);
                else
                    offset = -scale * __builtin_convertvector(
                                          (I32x16)zero_extend(after + v * kLanes), F32x16);
            }
            std::memcpy(scales + v * kLanes, &scale, sizeof scale);
            std::memcpy(offsets + v * kLanes, &offset, sizeof offset);
        }
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

constexpr std::int64_t kPassTokens = 32;  // their sums stay in L1
using Sums = float[kPassTokens][kPanelRows];

// Adds the dot products of a token with kRows rows, from row `at` of a panel on.
template <typename Block, typename Header>
inline void add_dots(float* sums, Integers dots, const Block& block, const Header& header, int at) {
    Floats total = load_floats(sums + at);
    total = multiply_add(total, scaled(dots, block.scale), load_floats(header.scales + at));
    total = multiply_add(total, load_floats(header.offsets + at), block.sum);
    std::memcpy(sums + at, &total, sizeof total);
}

// Multiplies up to kPassTokens tokens by a panel. The weights of a block stay in registers
// meanwhile.
template <NumberFormat FORMAT, ScaleType SCALE, int COLUMNS>
void multiply_pass(const Gemm<COLUMNS>& p, std::int64_t panel, std::int64_t first,
                   std::int64_t num_tokens) {
    alignas(64) Sums sums;
    std::memset(sums, 0, sizeof sums[0] * num_tokens);
    const ActivationBlock<COLUMNS>* blocks = p.token(first);
    const std::int64_t stride = p.num_blocks();
    for (std::int64_t group = 0; group < p.layout.num_groups(); ++group) {
        const auto* words =
            static_cast<const std::uint8_t*>(p.matrix.packed) + p.layout.group_at(panel, group);
        const GroupHeader<FORMAT, SCALE> header(words);
        words += header_bytes_of(FORMAT, SCALE);
        for (std::int64_t i = 0; i < p.blocks_per_group(); ++i, ++blocks) {
#pragma GCC unroll 8  // for one token
            for (int at = 0; at < kPanelRows; at += kRows) {
                const Weights<FORMAT, COLUMNS> weights(words + at * sizeof(std::uint32_t));
                for (std::int64_t t = 0; t < num_tokens; ++t) {
                    const ActivationBlock<COLUMNS>& block = blocks[t * stride];
                    add_dots(sums[t], weights.dot(block), block, header, at);
                }
            }
            words += kPanelRows * COLUMNS * bits_of(FORMAT) / 8;
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
    return choose_by_format(layout,
                            []<NumberFormat FORMAT, ScaleType SCALE>() -> MultiplyPanel<COLUMNS> {
                                if constexpr (COLUMNS == 32 || bits_of(FORMAT) == 8)
                                    return multiply_panel<FORMAT, SCALE, COLUMNS>;
                                return nullptr;
                            });
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
    ThreadPool::instance().run(args.num_threads, [&](int i, int) {
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
