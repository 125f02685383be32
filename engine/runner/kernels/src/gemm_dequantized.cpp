// GEMM with weights of 4 bits, or of 8 bits in small groups, with AMX: dequantized to bf16, and
// multiplied by tiles as bf16 weights.
//
// The tiles of a panel hold 16 rows by 32 columns of weights (16 columns if a group has no more),
// those of the activations as many pairs of columns by 16 tokens, so sums are stored by row of
// weights. A token's sums accumulate in the order of the columns, for any number of tokens.

#if defined(__AMX_BF16__)

#include "gemm.h"
#include "microkernel.h"
#include "quantization.h"
#include "streaming.h"
#include "thread_pool.h"

namespace baton::dequantized {

namespace {

// Tiles 0 to 3 are sums, 4 and 5 hold activations, 6 and 7 weights. Tiles 0, 1 and 4 belong to the
// first tokens, 2, 3 and 5 to the second ones.
class RunTiles : public Tiles {
  public:
    void configure(std::int64_t columns, int first, int second) {
        if (columns == columns_ && first == first_ && second == second_) return;
        Shapes shapes;
        for (int tile = 0; tile < 8; ++tile) {
            const bool is_first = tile == 0 || tile == 1 || tile == 4;
            shapes.row_bytes[tile] = tile >= 6 ? 2 * columns : 4 * (is_first ? first : second);
            shapes.rows[tile] = tile == 4 || tile == 5 ? columns / 2 : kTileRows;
        }
        load(shapes);
        columns_ = columns, first_ = first, second_ = second;
    }

  private:
    std::int64_t columns_ = 0;
    int first_ = 0, second_ = 0;
};

// The activations of up to sixteen tokens, packed: by pair of columns, then by token.
struct Run {
    const std::uint32_t* pairs;
    std::int64_t block_pairs;
    int num_tokens;

    const std::uint32_t* block(std::int64_t index) const {
        return pairs + index * block_pairs * num_tokens;
    }
    std::int64_t stride() const { return num_tokens * std::int64_t(sizeof(std::uint32_t)); }
};

// Transposes sixteen rows of sixteen numbers.
inline void transpose(F32x16 (&rows)[kTileRows]) {
    __m512 a[kTileRows], b[kTileRows];
    for (int i = 0; i < kTileRows; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
    }
    for (int i = 0; i < kTileRows; i += 4)
        for (int j = 0; j < 2; ++j) {
            const auto low = (__m512d)a[i + j], high = (__m512d)a[i + j + 2];
            b[i + 2 * j] = (__m512)_mm512_unpacklo_pd(low, high);
            b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(low, high);
        }
    for (int half = 0; half < kTileRows; half += 8)
        for (int i = 0; i < 4; ++i) {
            a[half + i] = _mm512_shuffle_f32x4(b[half + i], b[half + i + 4], 0x88);
            a[half + i + 4] = _mm512_shuffle_f32x4(b[half + i], b[half + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; ++i) {
        rows[i] = (F32x16)_mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
        rows[i + 8] = (F32x16)_mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
    }
}

// Activations of a GEMM in runs of sixteen tokens; the last run of a matrix may have fewer. Columns
// are padded with zeros to whole blocks.
class PackedActivations {
  public:
    void pack(const GroupedLinear& args, const QuantizedLayout& layout) {
        padded_pairs_ = layout.padded_columns() / 2;
        block_pairs_ = layout.tile_columns() / 2;
        pairs_.resize(std::size_t(args.num_rows() * padded_pairs_));
        runs_.clear();
        for (std::int64_t i = 0; i < args.num_matrices; ++i)
            for (std::int64_t row = args.row_offsets[i]; row < args.row_offsets[i + 1];)
                row =
                    runs_.emplace_back(row, std::min(row + kTileRows, args.row_offsets[i + 1])).end;
        parallel_for(std::int64_t(runs_.size()), kTileRows * layout.num_columns, args.num_threads,
                     [&](std::int64_t first, std::int64_t end) {
                         for (; first < end; ++first) pack_run(args.src, layout, runs_[first]);
                     });
    }

    // The run of tokens from `first` up to at most `end`.
    Run run(std::int64_t first, std::int64_t end) const {
        return {pairs_.data() + first * padded_pairs_, block_pairs_,
                int(std::min<std::int64_t>(end - first, kTileRows))};
    }

  private:
    struct Rows {
        std::int64_t first, end;
    };

    void pack_run(const Bf16* src, const QuantizedLayout& layout, Rows rows) {
        std::uint32_t* target = pairs_.data() + rows.first * padded_pairs_;
        const std::int64_t num_tokens = rows.end - rows.first;
        const Bf16* first = src + rows.first * layout.num_columns;
        for (std::int64_t left = layout.num_columns; left > 0; left -= layout.group_size) {
            const std::int64_t columns = std::min(layout.group_size, left);
            for (std::int64_t at = 0; at < layout.padded_group(); at += 2 * block_pairs_) {
                const std::int64_t count =
                    std::clamp<std::int64_t>(columns - at, 0, 2 * block_pairs_);
                pack_block(target, first + at, layout.num_columns, num_tokens, count);
                target += block_pairs_ * num_tokens;
            }
            first += columns;
        }
    }

    void pack_block(std::uint32_t* target, const Bf16* src, std::int64_t stride,
                    std::int64_t num_tokens, std::int64_t num_columns) const {
        F32x16 rows[kTileRows] = {};
        for (std::int64_t t = 0; t < num_tokens; ++t)
            std::memcpy(&rows[t], src + t * stride, num_columns * sizeof(Bf16));
        if (num_tokens == 1) {
            std::memcpy(target, rows, block_pairs_ * sizeof *target);
            return;
        }
        transpose(rows);
        for (std::int64_t pair = 0; pair < block_pairs_; ++pair, target += num_tokens)
            std::memcpy(target, &rows[pair], num_tokens * sizeof *target);
    }

    std::int64_t padded_pairs_ = 0, block_pairs_ = 0;
    AlignedVector<std::uint32_t> pairs_;
    std::vector<Rows> runs_;
};

// Scales of a panel's rows in a group, and what is added to the products with them.
template <NumberFormat FORMAT, ScaleType SCALE>
struct GroupHeader {
    alignas(64) float scales[kPanelRows], zeros[kPanelRows];

    explicit GroupHeader(const std::uint8_t* group) {
        for (int v = 0; v < kVectors; ++v) {
            const auto* const after = group + zeros_offset_of(FORMAT, SCALE);
            F32x16 scale, zero{};
            if constexpr (FORMAT == NumberFormat::kMxfp4)
                scale = load_mxfp4_scales(group, v);
            else
                scale = load_scales<SCALE>(group, v);
            if constexpr (has_offsets(FORMAT))
                zero = load_scales<SCALE>(after, v);
            else if constexpr (kHasZeros)
                zero = __builtin_convertvector((I32x16)zero_extend(after + v * kLanes), F32x16);
            if constexpr (kHasZeros && !kSubtractsFirst) zero *= -scale;
            std::memcpy(scales + v * kLanes, &scale, sizeof scale);
            std::memcpy(zeros + v * kLanes, &zero, sizeof zero);
        }
    }

    // The values of sixteen numbers in a row.
    __m512 values(__m512 numbers, int row) const {
        const __m512 scale = _mm512_set1_ps(scales[row]), zero = _mm512_set1_ps(zeros[row]);
        if constexpr (FORMAT == NumberFormat::kMxfp4) return _mm512_mul_ps(numbers, scale);
        if constexpr (kSubtractsFirst) return _mm512_mul_ps(_mm512_sub_ps(numbers, zero), scale);
        return _mm512_fmadd_ps(numbers, scale, zero);
    }

  private:
    static constexpr bool kHasZeros = !has_offsets(FORMAT) && FORMAT != NumberFormat::kMxfp4;
    // Zero points times scales of 16 bits are exact, those of 32 bits are not.
    static constexpr bool kSubtractsFirst = kHasZeros && SCALE == ScaleType::kFloat32;
};

template <NumberFormat FORMAT>
__m512 code_values() {
    alignas(64) float codes[kLanes];
    for (int code = 0; code < kLanes; ++code)
        codes[code] = FORMAT == NumberFormat::kMxfp4 ? float(kFp4Bytes[code] - kFp4Zero) : code;
    return _mm512_load_ps(codes);
}

// Dequantizes 64 rows by 32 columns of 4 bits. A table of two rows' values is looked up by 32 codes
// at once.
template <NumberFormat FORMAT, ScaleType SCALE>
inline void dequantize_codes(Bf16* block, const GroupHeader<FORMAT, SCALE>& header, __m512 codes,
                             const std::uint8_t* numbers) {
    const __m512i code_bits = _mm512_set1_epi16(15), second_row = _mm512_set1_epi16(16);
    auto* const rows = reinterpret_cast<U32x16*>(block);
    for (int row = 0; row < kPanelRows; row += 4, numbers += sizeof(U32x16)) {
        prefetch_ahead(reinterpret_cast<const U32x16*>(numbers), 1);
        const __m512i words = _mm512_loadu_si512(numbers);  // each has the codes of four rows
        for (int i = 0; i < 4; i += 2) {
            const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(header.values(codes, row + i + 1),
                                                               header.values(codes, row + i));
            const __m512i first = _mm512_and_si512(_mm512_srli_epi16(words, 4 * i), code_bits);
            const __m512i second = _mm512_or_si512(
                _mm512_and_si512(_mm512_srli_epi16(words, 4 * i + 4), code_bits), second_row);
            rows[row + i] = (U32x16)_mm512_permutexvar_epi16(first, table);
            rows[row + i + 1] = (U32x16)_mm512_permutexvar_epi16(second, table);
        }
    }
}

// Dequantizes 64 rows by 16 or 32 columns of 8 bits.
template <NumberFormat FORMAT, ScaleType SCALE, int COLUMNS>
inline void dequantize_bytes(Bf16* block, const GroupHeader<FORMAT, SCALE>& header,
                             const std::uint8_t* numbers) {
    const auto load = [](const std::uint8_t* bytes) {
        return (__m512) __builtin_convertvector((I32x16)zero_extend(bytes), F32x16);
    };
    for (int row = 0; row < kPanelRows; ++row, block += COLUMNS, numbers += COLUMNS) {
        if (row * COLUMNS % int(sizeof(U32x16)) == 0)
            prefetch_ahead(reinterpret_cast<const U32x16*>(numbers), 1);
        const auto low = (F32x16)header.values(load(numbers), row);
        if constexpr (COLUMNS == kLanes)
            store(block, low);
        else
            store(block, low, (F32x16)header.values(load(numbers + kLanes), row));
    }
}

// Dequantizes the blocks of columns of a panel, each to target(index), and calls step(index).
template <NumberFormat FORMAT, ScaleType SCALE, typename Target, typename Step>
inline void dequantize_panel(const QuantizedLayout& layout, const void* packed, std::int64_t panel,
                             Target target, Step step) {
    constexpr std::int64_t kHeaderBytes = header_bytes_of(FORMAT, SCALE);
    const std::int64_t columns = layout.tile_columns(), blocks = layout.padded_group() / columns;
    const __m512 codes = code_values<FORMAT>();
    for (std::int64_t group = 0; group < layout.num_groups(); ++group) {
        const auto* at = static_cast<const std::uint8_t*>(packed) + layout.group_at(panel, group);
        prefetch_ahead(reinterpret_cast<const U32x16*>(at), kHeaderBytes / sizeof(U32x16));
        const GroupHeader<FORMAT, SCALE> header(at);
        at += kHeaderBytes;
        for (std::int64_t i = 0; i < blocks; ++i, at += kPanelRows * columns * layout.bits / 8) {
            const std::int64_t index = group * blocks + i;
            if constexpr (bits_of(FORMAT) == 4)
                dequantize_codes<FORMAT, SCALE>(target(index), header, codes, at);
            else if (columns == kLanes)
                dequantize_bytes<FORMAT, SCALE, kLanes>(target(index), header, at);
            else
                dequantize_bytes<FORMAT, SCALE, 2 * kLanes>(target(index), header, at);
            step(index);
        }
    }
}

// Sums of a panel: by row, then by token of a run.
using Sums = float[kPanelRows][kTileRows];

// A matrix, its output, and the tokens from `first` up to `end`.
struct Gemm {
    QuantizedLayout layout;
    const PackedMatrix& matrix;
    const PackedActivations& activations;
    Bf16* dst;  // [tokens, rows]
    std::int64_t first, end;
    bool is_streamed;

    std::int64_t num_blocks() const { return layout.padded_columns() / layout.tile_columns(); }
};

// Rounds and stores 32 columns of the tokens' output rows, from column `at` on.
void store_tokens(const Gemm& p, std::int64_t at, std::int64_t first, int num_tokens,
                  const float (*sums)[kTileRows]) {
    const std::int64_t num_rows = p.layout.num_rows;
    F32x16 low[kTileRows], high[kTileRows];
    std::memcpy(low, sums, sizeof low);
    std::memcpy(high, sums + kLanes, sizeof high);
    transpose(low);
    transpose(high);
    const Bf16* const bias = p.matrix.bias;
    Bf16* dst = p.dst + first * num_rows;
    for (int t = 0; t < num_tokens; ++t, dst += num_rows) {
        if (at + 2 * kLanes > num_rows) {
            if (at < num_rows) store_columns(low[t], bias, dst, at, num_rows);
            if (at + kLanes < num_rows) store_columns(high[t], bias, dst, at + kLanes, num_rows);
            continue;
        }
        if (bias != nullptr)
            low[t] += bf16_to_f32(bias + at), high[t] += bf16_to_f32(bias + at + kLanes);
        p.is_streamed ? stream(dst + at, low[t], high[t]) : store(dst + at, low[t], high[t]);
    }
}

void store_sums(const Gemm& p, std::int64_t panel, std::int64_t first, int num_tokens,
                const Sums& sums) {
    for (int row = 0; row < kPanelRows; row += 2 * kLanes)
        store_tokens(p, panel * kPanelRows + row, first, num_tokens, sums + row);
}

// Multiplies all rows of a block by one run. Tiles 0 to 3 accumulate.
inline void add_block(const Bf16* block, const Run& run, std::int64_t index) {
    const std::int64_t columns = 2 * run.block_pairs, next = columns * sizeof(Bf16);
    compiler_barrier();
    _tile_loadd(4, run.block(index), run.stride());
    _tile_loadd(6, block, next);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(7, block + kTileRows * columns, next);
    _tile_dpbf16ps(1, 7, 4);
    _tile_loadd(6, block + 2 * kTileRows * columns, next);
    _tile_dpbf16ps(2, 6, 4);
    _tile_loadd(7, block + 3 * kTileRows * columns, next);
    _tile_dpbf16ps(3, 7, 4);
}

inline void zero_sums() {
    compiler_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

inline void store_run(Sums& sums) {
    _tile_stored(0, sums[0], sizeof sums[0]);
    _tile_stored(1, sums[kTileRows], sizeof sums[0]);
    _tile_stored(2, sums[2 * kTileRows], sizeof sums[0]);
    _tile_stored(3, sums[3 * kTileRows], sizeof sums[0]);
    compiler_barrier();
}

// Multiplies a single run. A block is multiplied while the next one is dequantized.
template <NumberFormat FORMAT, ScaleType SCALE>
void multiply_run(const Gemm& p, RunTiles& tiles, std::int64_t panel) {
    const Run run = p.activations.run(p.first, p.end);
    tiles.configure(p.layout.tile_columns(), run.num_tokens, run.num_tokens);
    alignas(64) Bf16 blocks[2][kPanelRows * 2 * kLanes];
    zero_sums();
    dequantize_panel<FORMAT, SCALE>(
        p.layout, p.matrix.packed, panel, [&](std::int64_t index) { return blocks[index % 2]; },
        [&](std::int64_t index) {
            if (index > 0) add_block(blocks[(index - 1) % 2], run, index - 1);
        });
    const std::int64_t last = p.num_blocks() - 1;
    add_block(blocks[last % 2], run, last);
    alignas(64) Sums sums;
    store_run(sums);
    store_sums(p, panel, p.first, run.num_tokens, sums);
}

// Multiplies half of a panel by two runs. Tiles 0 and 1 are sums of the first run, 2 and 3 those of
// the second run.
inline void multiply_half(RunTiles& tiles, const Bf16* blocks, std::int64_t num_blocks, int half,
                          const Run& first, const Run& second, Sums& first_sums,
                          Sums& second_sums) {
    constexpr std::int64_t kNextSums = sizeof first_sums[0];
    const std::int64_t columns = 2 * first.block_pairs, next = columns * sizeof(Bf16);
    const int row = half * 2 * kTileRows;
    zero_sums();
    for (std::int64_t index = 0; index < num_blocks; ++index) {
        const Bf16* const rows = blocks + (index * kPanelRows + row) * columns;
        _tile_loadd(4, first.block(index), first.stride());
        _tile_loadd(6, rows, next);
        insert_nops();
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(7, rows + kTileRows * columns, next);
        insert_nops();
        _tile_dpbf16ps(1, 7, 4);
        _tile_loadd(5, second.block(index), second.stride());
        insert_nops();
        _tile_dpbf16ps(2, 6, 5);
        insert_nops();
        _tile_dpbf16ps(3, 7, 5);
        tiles.store_dummy_tile(index * kPairsPerTile);
    }
    _tile_stored(0, first_sums[row], kNextSums);
    _tile_stored(1, first_sums[row + kTileRows], kNextSums);
    _tile_stored(2, second_sums[row], kNextSums);
    _tile_stored(3, second_sums[row + kTileRows], kNextSums);
    compiler_barrier();
}

template <NumberFormat FORMAT, ScaleType SCALE>
void multiply_runs(const Gemm& p, RunTiles& tiles, std::int64_t panel) {
    thread_local AlignedVector<Bf16> dequantized;
    const std::int64_t columns = p.layout.tile_columns(), num_blocks = p.num_blocks();
    dequantized.resize(std::size_t(num_blocks * kPanelRows * columns));
    Bf16* const blocks = dequantized.data();
    const auto block = [&](std::int64_t index) { return blocks + index * kPanelRows * columns; };
    dequantize_panel<FORMAT, SCALE>(p.layout, p.matrix.packed, panel, block, [](std::int64_t) {});
    alignas(64) Sums sums[2];
    for (std::int64_t first = p.first; first < p.end; first += 2 * kTileRows) {
        const std::int64_t middle = first + kTileRows;
        const Run upper = p.activations.run(first, p.end);
        if (middle >= p.end) {
            tiles.configure(columns, upper.num_tokens, upper.num_tokens);
            zero_sums();
            for (std::int64_t i = 0; i < num_blocks; ++i) add_block(block(i), upper, i);
            store_run(sums[0]);
        } else {
            const Run lower = p.activations.run(middle, p.end);
            tiles.configure(columns, upper.num_tokens, lower.num_tokens);
            for (int half = 0; half < 2; ++half)
                multiply_half(tiles, blocks, num_blocks, half, upper, lower, sums[0], sums[1]);
            store_sums(p, panel, middle, lower.num_tokens, sums[1]);
        }
        store_sums(p, panel, first, upper.num_tokens, sums[0]);
    }
}

template <NumberFormat FORMAT, ScaleType SCALE>
void multiply_panel(const Gemm& p, RunTiles& tiles, std::int64_t panel) {
    p.end - p.first <= kTileRows ? multiply_run<FORMAT, SCALE>(p, tiles, panel)
                                 : multiply_runs<FORMAT, SCALE>(p, tiles, panel);
}

using MultiplyPanel = void (*)(const Gemm&, RunTiles&, std::int64_t);

MultiplyPanel multiply_of(const QuantizedLayout& layout) {
    return choose_by_format(layout, []<NumberFormat FORMAT, ScaleType SCALE>() -> MultiplyPanel {
        return multiply_panel<FORMAT, SCALE>;
    });
}

// Tokens per pass: as many as fit into L2 together with a panel, in whole pairs of runs. Each pass
// dequantizes all weights.
std::int64_t tokens_per_pass(std::int64_t num_tokens, std::int64_t num_columns) {
    constexpr std::int64_t kBytes = 5 << 18, kPairTokens = 2 * kTileRows;
    const std::int64_t pairs = (num_tokens - 1) / kPairTokens + 1;
    const std::int64_t max_pairs = std::max<std::int64_t>(
        1, kBytes / (kPairTokens * num_columns * std::int64_t(sizeof(Bf16))));
    const std::int64_t passes = (pairs + max_pairs - 1) / max_pairs;
    return (pairs + passes - 1) / passes * kPairTokens;
}

}  // namespace

void linear(const GroupedLinear& args) {
    const QuantizedLayout layout(args.matrices[0]);
    thread_local PackedActivations buffer;
    // Captured by reference: all threads use the buffer of the calling thread.
    PackedActivations& activations = buffer;
    activations.pack(args, layout);
    std::int64_t max_tokens = 1;
    for (std::int64_t i = 0; i < args.num_matrices; ++i)
        max_tokens = std::max(max_tokens, args.row_offsets[i + 1] - args.row_offsets[i]);
    const std::int64_t pass_tokens = tokens_per_pass(max_tokens, layout.padded_columns());
    const std::int64_t passes = (max_tokens + pass_tokens - 1) / pass_tokens;
    const std::int64_t panels = layout.num_panels();
    const bool is_streamed = uses_streaming_stores(args);
    const MultiplyPanel multiply = multiply_of(layout);
    WorkQueue queue(args.num_matrices * panels, passes, args.num_threads);
    run_parallel(args.num_threads, [&](int i, int) {
        RunTiles tiles;
        for (WorkQueue::Unit unit; queue.next(i, unit);) {
            const std::int64_t index = unit.index / panels;
            const std::int64_t first = args.row_offsets[index] + unit.pass * pass_tokens;
            const std::int64_t end = std::min(first + pass_tokens, args.row_offsets[index + 1]);
            if (first >= end) continue;
            const Gemm gemm{layout, args.matrices[index], activations, args.dst, first,
                            end,    is_streamed};
            multiply(gemm, tiles, unit.index % panels);
        }
        if (is_streamed) streaming_fence();
    });
}

}  // namespace baton::dequantized

#endif
