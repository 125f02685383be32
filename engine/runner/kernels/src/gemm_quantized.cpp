// GEMM with packed weights of 4 or 8 bits.
//
// The activations of a token are quantized to 16-bit integers, stored as a row of high bytes and a
// row of low bytes. So the sums within a group of columns are exact integers, in any order. The
// groups are then summed in the order of the columns.

#include "gemm.h"
#include "panels.h"
#include "pool.h"
#include "tiles.h"

#include <algorithm>
#include <vector>

using namespace baton;

namespace {

constexpr int kMaxTokens = kMaxRows / 2;  // each token has two rows of bytes
constexpr float kMaxActivation = 32512;   // 127 * 256: the rounded high byte fits into int8
typedef std::uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

// Packed layout: by panel of rows, then by group of columns. A group begins with the scales and
// zero points of its rows, so that a thread reads one sequential stream.
struct PackedLayout {
    std::int64_t bits, num_rows, num_columns, group_size;

    PackedLayout() = default;
    explicit PackedLayout(const PackedMatrix& matrix)
        : bits(matrix.bits), num_rows(matrix.num_rows), num_columns(matrix.num_columns),
          group_size(matrix.group_size) {}

    std::int64_t num_groups() const { return (num_columns + group_size - 1) / group_size; }
    std::int64_t padded_group() const { return (group_size + 7) / 8 * 8; }
    std::int64_t padded_columns() const { return num_groups() * padded_group(); }
    std::int64_t num_panels() const { return (num_rows + kPanelRows - 1) / kPanelRows; }
    std::int64_t group_bytes() const {
        return kHeaderBytes + padded_group() * kPanelRows * bits / 8;
    }
    std::int64_t bytes() const { return num_panels() * num_groups() * group_bytes(); }

    std::int64_t group_at(std::int64_t panel, std::int64_t which) const {
        return (panel * num_groups() + which) * group_bytes();
    }
    // Offset of a number in its group; `column` dots within the group. Four columns of a row are
    // contiguous.
    std::int64_t byte_at(std::int64_t row, std::int64_t column) const {
        const std::int64_t quad = bits == 8 ? column / 4 : column / 8;
        return kHeaderBytes + (quad * kPanelRows + row) * 4 + column % 4;
    }
    int shift(std::int64_t column) const { return bits == 4 && column % 8 >= 4 ? 4 : 0; }

    static constexpr std::int64_t kZerosOffset = kPanelRows * sizeof(float);
    static constexpr std::int64_t kHeaderBytes = kZerosOffset + kPanelRows;
};

struct Product {
    PackedLayout layout;
    const std::uint8_t* packed;
    const Bf16* bias;  // or null
    Bf16* dst;         // [tokens, rows]
    std::int64_t num_tokens;
};

// Quantized activations. Reused from one GEMM to the next, to reuse its buffers.
class Activations {
  public:
    void resize(const PackedLayout& layout, std::int64_t num_tokens) {
        layout_ = layout;
        stride_ = layout.padded_columns();
        grow(bytes_, 2 * num_tokens * stride_);
        grow(sums_, 2 * num_tokens * layout.num_groups());
        grow(scales_, num_tokens);
    }

    void quantize(std::int64_t token, const Bf16* activations) {
        const float magnitude = max_magnitude(activations);
        // A non-finite activation makes the scale, and so the whole output row, non-finite.
        scales_[token] = magnitude / kMaxActivation;
        const bool is_nonzero = magnitude > 1e-30f && std::isfinite(magnitude);
        const float factor = is_nonzero ? kMaxActivation / magnitude : 0.0f;
        for (std::int64_t at = 0; at < stride_; at += kLanes) {
            const Floats numbers = is_nonzero ? load(activations, at) * factor : Floats{};
            const Ints quantized = nearest(numbers);
            const Ints high = (quantized + 128) >> 8;
            store_bytes(token, 0, at, high);
            store_bytes(token, 1, at, quantized - high * 256);
        }
        for (int part = 0; part < 2; ++part) sum_groups(token, part);
    }

    std::int8_t* row(std::int64_t token, int part) {
        return bytes_.data() + (2 * token + part) * stride_;
    }
    const std::uint32_t* quads(std::int64_t token, int part) {
        return reinterpret_cast<const std::uint32_t*>(row(token, part));
    }
    std::int64_t stride() const { return stride_; }  // from one row to the next
    std::int32_t& sum(std::int64_t token, int part, std::int64_t group) {
        return sums_[(2 * token + part) * layout_.num_groups() + group];
    }
    float scale(std::int64_t token) const { return scales_[token]; }

  private:
    template <typename Number>
    static void grow(std::vector<Number>& numbers, std::size_t size) {
        if (numbers.size() < size) numbers.resize(size);
    }

    float max_magnitude(const Bf16* activations) const {
        // Without sign bits, bf16 bit patterns are ordered by magnitude, with NaN above infinity.
        Bf16 magnitude = 0;
        for (std::int64_t i = 0; i < layout_.num_columns; ++i)
            magnitude = std::max<Bf16>(magnitude, activations[i] & 0x7fff);
        return wide(magnitude);
    }

    // Loads sixteen activations, padded with zeros.
    Floats load(const Bf16* activations, std::int64_t at) const {
        const std::int64_t left = layout_.num_columns - at;
        if (left >= kLanes) return wide(activations + at);
        Bf16 last[kLanes] = {};
        for (std::int64_t i = 0; i < left; ++i) last[i] = activations[at + i];
        return wide(last);
    }

    void store_bytes(std::int64_t token, int part, std::int64_t at, Ints numbers) {
        typedef std::int8_t Narrow __attribute__((vector_size(kLanes)));
        const Narrow bytes = __builtin_convertvector(numbers, Narrow);
        std::memcpy(row(token, part) + at, &bytes, std::min<std::int64_t>(kLanes, stride_ - at));
    }

    void sum_groups(std::int64_t token, int part) {
        const std::int8_t* bytes = row(token, part);
        for (std::int64_t group = 0; group < layout_.num_groups(); ++group) {
            std::int32_t total = 0;
            for (std::int64_t i = 0; i < layout_.padded_group(); ++i)
                total += bytes[group * layout_.padded_group() + i];
            sum(token, part, group) = total;
        }
    }

    PackedLayout layout_;
    std::int64_t stride_;
    std::vector<std::int8_t> bytes_;
    std::vector<std::int32_t> sums_;
    std::vector<float> scales_;
};

template <int ROWS>
using IntSums = Ints[ROWS][kVectors];

// dots += rows of bytes * the group's numbers.
template <int BITS, int ROWS>
inline void add_group(IntSums<ROWS>& dots, const std::uint32_t* const (&rows)[ROWS],
                      const Words* numbers, std::int64_t first, std::int64_t end) {
    constexpr int kQuads = 8 / BITS;
    for (std::int64_t quad = first; quad < end; quad += kQuads, numbers += kVectors) {
        fetch_ahead(numbers, kVectors);
        for (int part = 0; part < kQuads; ++part) {
            Words weights[kVectors];
            for (int v = 0; v < kVectors; ++v)
                weights[v] = BITS == 8 ? numbers[v] : numbers[v] >> (4 * part) & 0x0f0f0f0fu;
            for (int row = 0; row < ROWS; ++row) {
                const std::uint32_t activation = rows[row][quad + part];
                for (int v = 0; v < kVectors; ++v)
                    add_bytes(dots[row][v], weights[v], activation);
            }
        }
    }
}

// Dequantizes the integer sums of a group, for sixteen rows of a panel.
class Dequantizer {
  public:
    Dequantizer(const std::uint8_t* group, int v) {
        Bytes zero_bytes;
        std::memcpy(&scales_, group + v * sizeof scales_, sizeof scales_);
        const std::uint8_t* const zeros = group + PackedLayout::kZerosOffset;
        std::memcpy(&zero_bytes, zeros + v * kLanes, sizeof zero_bytes);
        zeros_ = __builtin_convertvector(zero_bytes, Ints);
    }

    // high, low: sums of products for the rows of high and low bytes.
    // high_sum, low_sum: sums of these bytes, which the zero points are multiplied by.
    Floats operator()(Ints high, Ints low, std::int32_t high_sum, std::int32_t low_sum) const {
        const Ints highs = high - zeros_ * high_sum, lows = low - zeros_ * low_sum;
        const Floats both = __builtin_convertvector(highs, Floats) * 256.0f +
                            __builtin_convertvector(lows, Floats);
        return both * scales_;
    }

  private:
    Floats scales_;
    Ints zeros_;
};

template <int BITS, int TOKENS>
void multiply(const Product& p, Activations& activations, std::int64_t panel, std::int64_t first) {
    const PackedLayout& layout = p.layout;
    const std::uint32_t* rows[2 * TOKENS];
    for (int t = 0; t < TOKENS; ++t)
        for (int part = 0; part < 2; ++part)
            rows[2 * t + part] = activations.quads(first + t, part);
    Totals<TOKENS> totals = {};
    const std::int64_t quads = layout.padded_group() / 4;
    for (std::int64_t group = 0; group < layout.num_groups(); ++group) {
        const std::uint8_t* at = p.packed + layout.group_at(panel, group);
        IntSums<2 * TOKENS> dots = {};
        const auto* numbers = reinterpret_cast<const Words*>(at + PackedLayout::kHeaderBytes);
        add_group<BITS, 2 * TOKENS>(dots, rows, numbers, group * quads, (group + 1) * quads);
        for (int v = 0; v < kVectors; ++v) {
            const Dequantizer dequantize(at, v);
            for (int t = 0; t < TOKENS; ++t)
                totals[t][v] += dequantize(dots[2 * t][v], dots[2 * t + 1][v],
                                           activations.sum(first + t, 0, group),
                                           activations.sum(first + t, 1, group));
        }
    }
    for (int t = 0; t < TOKENS; ++t)
        for (int v = 0; v < kVectors; ++v) totals[t][v] *= activations.scale(first + t);
    store_panel<TOKENS>(totals, p.bias, p.dst + first * p.layout.num_rows, panel, layout.num_rows);
}

template <int BITS>
void multiply_panel(const Product& p, Activations& activations, std::int64_t panel) {
    constexpr void (*kMultiply[])(const Product&, Activations&, std::int64_t, std::int64_t) = {
        nullptr, multiply<BITS, 1>,
#if defined(__AVX512BF16__)
        multiply<BITS, 2>, multiply<BITS, 3>,
#endif
    };
    for (std::int64_t first = 0; first < p.num_tokens;) {
        const int count = next_run(p.num_tokens - first, kMaxTokens);
        kMultiply[count](p, activations, panel, first);
        first += count;
    }
}

#if defined(__AMX_INT8__)

constexpr int kTileTokens = kTileRows / 2;

// dots = rows of bytes * the group's 8-bit numbers, sixteen quads at a time.
void multiply_tiles(Tiles& tiles, Ints (&dots)[kTileRows][kVectors], const std::int8_t* rows,
                    std::int64_t stride, int num_rows, const Words* numbers, std::int64_t quads) {
    constexpr std::int64_t kQuads = 16, kNext = sizeof(Words) * kVectors;
    tiles.configure(num_rows, num_rows);
    compiler_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    std::int64_t quad = 0;
    for (; quad + kQuads <= quads; quad += kQuads) {
        const Words* part = numbers + quad * kVectors;
        _tile_loadd(4, rows + 4 * quad, stride);
        _tile_loadd(6, part, kNext);
        _tile_dpbsud(0, 4, 6);
        fetch_ahead(part, kTileRows);
        _tile_loadd(7, part + 1, kNext);
        _tile_dpbsud(1, 4, 7);
        fetch_ahead(part + kTileRows, kTileRows);
        _tile_loadd(6, part + 2, kNext);
        _tile_dpbsud(2, 4, 6);
        fetch_ahead(part + 2 * kTileRows, kTileRows);
        _tile_loadd(7, part + 3, kNext);
        _tile_dpbsud(3, 4, 7);
        fetch_ahead(part + 3 * kTileRows, kTileRows);
    }
    _tile_stored(0, &dots[0][0], kNext);
    _tile_stored(1, &dots[0][1], kNext);
    _tile_stored(2, &dots[0][2], kNext);
    _tile_stored(3, &dots[0][3], kNext);
    for (int row = 0; quad < quads && row < num_rows; ++row) {
        const std::uint32_t* own[] = {reinterpret_cast<const std::uint32_t*>(rows + row * stride)};
        auto& row_dots = reinterpret_cast<IntSums<1>&>(dots[row]);
        add_group<8, 1>(row_dots, own, numbers + quad * kVectors, quad, quads);
    }
}

void multiply_tokens(const Product& p, Activations& activations, Tiles& tiles, std::int64_t panel,
                     std::int64_t first, int num_tokens) {
    const PackedLayout& layout = p.layout;
    const std::int64_t quads = layout.padded_group() / 4;
    Floats totals[kTileTokens][kVectors] = {};
    for (std::int64_t group = 0; group < layout.num_groups(); ++group) {
        const std::uint8_t* at = p.packed + layout.group_at(panel, group);
        alignas(64) Ints dots[kTileRows][kVectors];
        multiply_tiles(tiles, dots, activations.row(first, 0) + group * layout.padded_group(),
                       activations.stride(), 2 * num_tokens,
                       reinterpret_cast<const Words*>(at + PackedLayout::kHeaderBytes), quads);
        for (int v = 0; v < kVectors; ++v) {
            const Dequantizer dequantize(at, v);
            for (int t = 0; t < num_tokens; ++t)
                totals[t][v] += dequantize(dots[2 * t][v], dots[2 * t + 1][v],
                                           activations.sum(first + t, 0, group),
                                           activations.sum(first + t, 1, group));
        }
    }
    for (int t = 0; t < num_tokens; ++t) {
        for (int v = 0; v < kVectors; ++v) totals[t][v] *= activations.scale(first + t);
        store_row(totals[t], p.bias, p.dst + (first + t) * layout.num_rows, panel, layout.num_rows);
    }
}

// With few tokens vectors are a little faster than tiles. The results are identical.
void multiply_bytes(const Product& p, Activations& activations, std::int64_t panel) {
    if (p.num_tokens <= kMaxTokens) return multiply_panel<8>(p, activations, panel);
    Tiles tiles;
    for (std::int64_t first = 0, count; first < p.num_tokens; first += count) {
        count = std::min<std::int64_t>(p.num_tokens - first, kTileTokens);
        multiply_tokens(p, activations, tiles, panel, first, int(count));
    }
}

#else

void multiply_bytes(const Product& p, Activations& activations, std::int64_t panel) {
    multiply_panel<8>(p, activations, panel);
}

#endif

}  // namespace

namespace baton::quantized {

std::int64_t packed_bytes(const PackedMatrix& matrix) { return PackedLayout(matrix).bytes(); }

void pack(const PackArgs& args) {
    const PackedLayout layout(args.matrix);
    const auto* const weights = static_cast<const std::uint8_t*>(args.weights);
    auto* const packed = static_cast<std::uint8_t*>(args.matrix.packed);
    Pool::instance().run(args.num_threads, [&](int i, int count) {
        const Slice slice(layout.num_rows, i, count);
        for (std::int64_t row = slice.first; row < slice.end; ++row) {
            const std::int64_t panel = row / kPanelRows, within = row % kPanelRows;
            for (std::int64_t which = 0; which < layout.num_groups(); ++which) {
                std::uint8_t* at = packed + layout.group_at(panel, which);
                const std::int64_t scale_at = row * layout.num_groups() + which;
                std::memcpy(at + within * sizeof(float), args.scales + scale_at, sizeof(float));
                at[PackedLayout::kZerosOffset + within] = args.zeros[scale_at];
                const std::int64_t first = which * layout.group_size;
                const std::int64_t columns =
                    std::min(layout.group_size, layout.num_columns - first);
                for (std::int64_t column = 0; column < columns; ++column)
                    at[layout.byte_at(within, column)] |=
                        weights[row * layout.num_columns + first + column]
                        << layout.shift(column);
            }
        }
    });
}

void get_rows(const PackedMatrix& matrix, const std::int64_t* row_ids, std::int64_t count,
              Bf16* dst) {
    const PackedLayout layout(matrix);
    const auto* const packed = static_cast<const std::uint8_t*>(matrix.packed);
    const int mask = layout.bits == 4 ? 15 : 255;
    for (std::int64_t i = 0; i < count; ++i)
        for (std::int64_t column = 0; column < layout.num_columns; ++column) {
            const std::int64_t panel = row_ids[i] / kPanelRows, within = row_ids[i] % kPanelRows;
            const std::int64_t inside = column % layout.group_size;
            const std::uint8_t* at = packed + layout.group_at(panel, column / layout.group_size);
            float scale;
            std::memcpy(&scale, at + within * sizeof scale, sizeof scale);
            const int number = at[layout.byte_at(within, inside)] >> layout.shift(inside) & mask;
            const int zero = at[PackedLayout::kZerosOffset + within];
            dst[i * layout.num_columns + column] = narrow(float(number - zero) * scale);
        }
}

void linear(const LinearArgs& args) {
    const PackedMatrix& matrix = args.matrix;
    const Product product{PackedLayout(matrix), static_cast<const std::uint8_t*>(matrix.packed),
                          matrix.bias, args.dst, args.num_tokens};
    const std::int64_t num_columns = matrix.num_columns;
    thread_local Activations buffer;
    Activations& quantized = buffer;  // captured by reference: all threads use the caller's
    quantized.resize(product.layout, args.num_tokens);
    const auto quantize = [&](std::int64_t token, std::int64_t end) {
        for (; token < end; ++token) quantized.quantize(token, args.src + token * num_columns);
    };
    parallel_for(args.num_tokens, num_columns, args.num_threads, quantize);
    WorkQueue queue(product.layout.num_panels(), 1, args.num_threads);
    Pool::instance().run(args.num_threads, [&](int i, int) {
        for (WorkQueue::Unit unit; queue.next(i, unit);)
            matrix.bits == 4 ? multiply_panel<4>(product, quantized, unit.which)
                             : multiply_bytes(product, quantized, unit.which);
    });
}

}  // namespace baton::quantized
