// GEMM with packed weights of 4 or 8 bits.
//
// The activations of a token are quantized to 16-bit integers, stored as a row of high bytes and a
// row of low bytes. So the sums within a group of columns are exact integers, in any order. The
// groups are then summed in the order of the columns.

#include "gemm.h"
#include "microkernel.h"
#include "quantization.h"
#include "thread_pool.h"

#include <algorithm>

using namespace baton;

namespace {

// Each token has two rows of bytes.
#if defined(__AVX512BF16__)
constexpr int kMaxTokens = kMaxRows / 2;
#else
constexpr int kMaxTokens = 1;
#endif
typedef std::uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

// The tokens from `first` up to `end` times a matrix.
struct Gemm {
    QuantizedLayout layout;
    const std::uint8_t* packed;
    const Bf16* bias;  // or null
    Bf16* dst;         // [tokens, rows]
    std::int64_t first, end;
};

template <int ROWS>
using IntSums = I32x16[ROWS][kVectors];

// The unsigned bytes of four columns out of a vector of packed numbers.
template <NumberFormat FORMAT, typename Words>
inline Words unpack(Words numbers, int part) {
    if (FORMAT == NumberFormat::kInt8) return numbers;
    const Words halves = numbers >> (4 * part) & 0x0f0f0f0fu;
    return FORMAT == NumberFormat::kMxfp4 ? fp4_bytes(halves) : halves;
}

#if defined(__AVX2__) && !defined(__AVX512BF16__)

// dots += rows of bytes * the group's numbers of 4 bits. The sum of eight products of a byte up to
// 24 and a signed byte fits into 16 bits, so four quads are added before they are widened.
template <NumberFormat FORMAT, int ROWS>
inline void add_group_of_4_bits(IntSums<ROWS>& dots, const std::uint32_t* const (&rows)[ROWS],
                                const U32x16* numbers, std::int64_t first, std::int64_t end) {
    constexpr std::int64_t kQuads = 4;
    const __m256i ones = _mm256_set1_epi16(1);
    for (std::int64_t quad = first; quad < end; quad += kQuads, numbers += kQuads / 2 * kVectors) {
        const std::int64_t count = std::min(kQuads, end - quad);
        for (int half = 0; half < 2 * kVectors; ++half) {
            __m256i sums[ROWS] = {};
            for (std::int64_t i = 0; i < count; i += 2) {
                const auto* const halves =
                    reinterpret_cast<const U32x8*>(numbers + i / 2 * kVectors);
                for (int part = 0; part < 2; ++part) {
                    const __m256i weights = (__m256i)unpack<FORMAT>(halves[half], part);
                    for (int row = 0; row < ROWS; ++row) {
                        const __m256i right = _mm256_set1_epi32(int(rows[row][quad + i + part]));
                        sums[row] =
                            _mm256_add_epi16(sums[row], _mm256_maddubs_epi16(weights, right));
                    }
                }
            }
            for (int row = 0; row < ROWS; ++row)
                reinterpret_cast<I32x8*>(dots[row])[half] +=
                    (I32x8)_mm256_madd_epi16(sums[row], ones);
        }
    }
}

#endif

// dots += rows of bytes * the group's numbers.
template <NumberFormat FORMAT, int ROWS>
inline void add_group(IntSums<ROWS>& dots, const std::uint32_t* const (&rows)[ROWS],
                      const U32x16* numbers, std::int64_t first, std::int64_t end) {
#if defined(__AVX2__) && !defined(__AVX512BF16__)
    if constexpr (bits_of(FORMAT) == 4)
        return add_group_of_4_bits<FORMAT, ROWS>(dots, rows, numbers, first, end);
#endif
    constexpr int kQuads = 8 / bits_of(FORMAT);
    for (std::int64_t quad = first; quad < end; quad += kQuads, numbers += kVectors) {
        prefetch_ahead(numbers, kVectors);
        for (int part = 0; part < kQuads; ++part) {
            U32x16 weights[kVectors];
            for (int v = 0; v < kVectors; ++v) weights[v] = unpack<FORMAT>(numbers[v], part);
            for (int row = 0; row < ROWS; ++row) {
                const std::uint32_t activation = rows[row][quad + part];
                for (int v = 0; v < kVectors; ++v)
                    dot_add_int8(dots[row][v], weights[v], activation);
            }
        }
    }
}

// Dequantizes the integer sums of a group, for sixteen rows of a panel.
template <NumberFormat FORMAT>
class Dequantizer {
  public:
    Dequantizer(const std::uint8_t* group, int v) {
        Bytes zero_bytes;
        std::memcpy(&scales_, group + v * sizeof scales_, sizeof scales_);
        const std::uint8_t* const zeros = group + kZerosOffset;
        std::memcpy(&zero_bytes, zeros + v * kLanes, sizeof zero_bytes);
        zeros_ = __builtin_convertvector(zero_bytes, I32x16);
    }

    // high, low: sums of products for the rows of high and low bytes.
    // high_sum, low_sum: sums of these bytes, which the zero points are multiplied by.
    F32x16 operator()(I32x16 high, I32x16 low, std::int32_t high_sum, std::int32_t low_sum) const {
        const I32x16 highs = high - zeros_ * high_sum, lows = low - zeros_ * low_sum;
        const F32x16 both =
            __builtin_convertvector(highs, F32x16) * 256.0f + __builtin_convertvector(lows, F32x16);
        return both * scales_;
    }

  private:
    F32x16 scales_;
    I32x16 zeros_;
};

// A group of MXFP4 has 32 columns, so that the sum of both rows of bytes is below 2^24: exact.
template <>
class Dequantizer<NumberFormat::kMxfp4> {
  public:
    Dequantizer(const std::uint8_t* group, int v) {
        Bytes exponents;
        std::memcpy(&exponents, group + v * kLanes, sizeof exponents);
        const U32x16 bits = __builtin_convertvector(exponents, U32x16) << 23;
        scales_ = lane_max((F32x16)bits, splat(0x1p-127f)) * 0.5f;
    }

    F32x16 operator()(I32x16 high, I32x16 low, std::int32_t high_sum, std::int32_t low_sum) const {
        const I32x16 both = high * 256 + low - kFp4Zero * (high_sum * 256 + low_sum);
        return __builtin_convertvector(both, F32x16) * scales_;
    }

  private:
    F32x16 scales_;
};

template <NumberFormat FORMAT, int TOKENS>
void multiply(const Gemm& p, QuantizedActivations& activations, std::int64_t panel,
              std::int64_t first) {
    const QuantizedLayout& layout = p.layout;
    const std::uint32_t* rows[2 * TOKENS];
    for (int t = 0; t < TOKENS; ++t)
        for (int part = 0; part < 2; ++part)
            rows[2 * t + part] = activations.quads(first + t, part);
    Accumulators<TOKENS> acc = {};
    const std::int64_t quads = layout.padded_group() / 4;
    for (std::int64_t group = 0; group < layout.num_groups(); ++group) {
        const std::uint8_t* at = p.packed + layout.group_at(panel, group);
        IntSums<2 * TOKENS> dots = {};
        const auto* numbers = reinterpret_cast<const U32x16*>(at + header_bytes_of(FORMAT));
        add_group<FORMAT, 2 * TOKENS>(dots, rows, numbers, group * quads, (group + 1) * quads);
        for (int v = 0; v < kVectors; ++v) {
            const Dequantizer<FORMAT> dequantize(at, v);
            for (int t = 0; t < TOKENS; ++t)
                acc[t][v] += dequantize(dots[2 * t][v], dots[2 * t + 1][v],
                                        activations.sum(first + t, 0, group),
                                        activations.sum(first + t, 1, group));
        }
    }
    for (int t = 0; t < TOKENS; ++t)
        for (int v = 0; v < kVectors; ++v) acc[t][v] *= activations.scale(first + t);
    store_panel<TOKENS>(acc, p.bias, p.dst + first * p.layout.num_rows, panel, layout.num_rows);
}

template <NumberFormat FORMAT>
void multiply_panel(const Gemm& p, QuantizedActivations& activations, std::int64_t panel) {
    constexpr void (*kMultiply[])(const Gemm&, QuantizedActivations&, std::int64_t,
                                  std::int64_t) = {
        nullptr,
        multiply<FORMAT, 1>,
#if defined(__AVX512BF16__)
        multiply<FORMAT, 2>,
        multiply<FORMAT, 3>,
#endif
    };
    for (std::int64_t first = p.first; first < p.end;) {
        const int count = next_run(p.end - first, kMaxTokens);
        kMultiply[count](p, activations, panel, first);
        first += count;
    }
}

#if defined(__AMX_INT8__)

constexpr int kTileTokens = kTileRows / 2;

// dots = rows of bytes * the group's 8-bit numbers, sixteen quads at a time.
void multiply_tiles(TileConfig& tile_config, I32x16 (&dots)[kTileRows][kVectors],
                    const std::int8_t* rows, std::int64_t stride, int num_rows,
                    const U32x16* numbers, std::int64_t quads) {
    constexpr std::int64_t kQuads = 16, kNext = sizeof(U32x16) * kVectors;
    tile_config.configure(num_rows, num_rows);
    compiler_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    std::int64_t quad = 0;
    for (; quad + kQuads <= quads; quad += kQuads) {
        const U32x16* part = numbers + quad * kVectors;
        _tile_loadd(4, rows + 4 * quad, stride);
        _tile_loadd(6, part, kNext);
        _tile_dpbsud(0, 4, 6);
        prefetch_ahead(part, kTileRows);
        _tile_loadd(7, part + 1, kNext);
        _tile_dpbsud(1, 4, 7);
        prefetch_ahead(part + kTileRows, kTileRows);
        _tile_loadd(6, part + 2, kNext);
        _tile_dpbsud(2, 4, 6);
        prefetch_ahead(part + 2 * kTileRows, kTileRows);
        _tile_loadd(7, part + 3, kNext);
        _tile_dpbsud(3, 4, 7);
        prefetch_ahead(part + 3 * kTileRows, kTileRows);
    }
    _tile_stored(0, &dots[0][0], kNext);
    _tile_stored(1, &dots[0][1], kNext);
    _tile_stored(2, &dots[0][2], kNext);
    _tile_stored(3, &dots[0][3], kNext);
    for (int row = 0; quad < quads && row < num_rows; ++row) {
        const std::uint32_t* own[] = {reinterpret_cast<const std::uint32_t*>(rows + row * stride)};
        auto& row_dots = reinterpret_cast<IntSums<1>&>(dots[row]);
        add_group<NumberFormat::kInt8, 1>(row_dots, own, numbers + quad * kVectors, quad, quads);
    }
}

void multiply_tokens(const Gemm& p, QuantizedActivations& activations, TileConfig& tile_config,
                     std::int64_t panel, std::int64_t first, int num_tokens) {
    const QuantizedLayout& layout = p.layout;
    const std::int64_t quads = layout.padded_group() / 4;
    F32x16 acc[kTileTokens][kVectors] = {};
    for (std::int64_t group = 0; group < layout.num_groups(); ++group) {
        const std::uint8_t* at = p.packed + layout.group_at(panel, group);
        alignas(64) I32x16 dots[kTileRows][kVectors];
        multiply_tiles(tile_config, dots, activations.row(first, 0) + group * layout.padded_group(),
                       activations.stride(), 2 * num_tokens,
                       reinterpret_cast<const U32x16*>(at + header_bytes_of(NumberFormat::kInt8)),
                       quads);
        for (int v = 0; v < kVectors; ++v) {
            const Dequantizer<NumberFormat::kInt8> dequantize(at, v);
            for (int t = 0; t < num_tokens; ++t)
                acc[t][v] += dequantize(dots[2 * t][v], dots[2 * t + 1][v],
                                        activations.sum(first + t, 0, group),
                                        activations.sum(first + t, 1, group));
        }
    }
    for (int t = 0; t < num_tokens; ++t) {
        for (int v = 0; v < kVectors; ++v) acc[t][v] *= activations.scale(first + t);
        store_row(acc[t], p.bias, p.dst + (first + t) * layout.num_rows, panel, layout.num_rows);
    }
}

// With few tokens vectors are a little faster than tiles. The results are identical.
void multiply_bytes(const Gemm& p, QuantizedActivations& activations, std::int64_t panel) {
    if (p.end - p.first <= kMaxTokens)
        return multiply_panel<NumberFormat::kInt8>(p, activations, panel);
    TileConfig tile_config;
    for (std::int64_t first = p.first, count; first < p.end; first += count) {
        count = std::min<std::int64_t>(p.end - first, kTileTokens);
        multiply_tokens(p, activations, tile_config, panel, first, int(count));
    }
}

#else

void multiply_bytes(const Gemm& p, QuantizedActivations& activations, std::int64_t panel) {
    multiply_panel<NumberFormat::kInt8>(p, activations, panel);
}

#endif

// By NumberFormat.
constexpr void (*kMultiplyPanel[])(const Gemm&, QuantizedActivations&, std::int64_t) = {
    multiply_bytes,
    multiply_panel<NumberFormat::kInt4>,
    multiply_panel<NumberFormat::kMxfp4>,
};

}  // namespace

namespace baton::quantized {

void linear(const GroupedLinear& args) {
    const QuantizedLayout layout(args.matrices[0]);
    thread_local QuantizedActivations buffer;
    // Captured by reference: all threads use the buffer of the calling thread.
    QuantizedActivations& quantized = buffer;
    quantized.resize(layout, args.num_rows());
    const auto quantize = [&](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row) quantized.quantize(row, args.src + row * layout.num_columns);
    };
    parallel_for(args.num_rows(), layout.num_columns, args.num_threads, quantize);
    const std::int64_t panels = layout.num_panels();
    WorkQueue queue(args.num_matrices * panels, 1, args.num_threads);
    ThreadPool::instance().run(args.num_threads, [&](int i, int) {
        for (WorkQueue::Unit unit; queue.next(i, unit);) {
            const std::int64_t index = unit.index / panels, panel = unit.index % panels;
            const PackedMatrix& matrix = args.matrices[index];
            const Gemm gemm{layout,
                            static_cast<const std::uint8_t*>(matrix.packed),
                            matrix.bias,
                            args.dst,
                            args.row_offsets[index],
                            args.row_offsets[index + 1]};
            kMultiplyPanel[int(layout.format)](gemm, quantized, panel);
        }
    });
}

}  // namespace baton::quantized
