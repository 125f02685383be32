// GEMM with weights of 4 bits on AMX: dequantized to bf16, and multiplied by tiles as bf16 weights.
//
// The tiles of a panel hold 16 rows by 32 columns of weights, those of the activations 16 pairs of
// columns by 16 tokens, so sums are stored by row of weights. A token's sums accumulate in the
// order of the columns, for any number of tokens.

#include "gemm.h"
#include "quantization.h"
#include "streaming.h"
#include "thread_pool.h"

#if defined(__AMX_BF16__)

#include "microkernel.h"

namespace baton::dequantized {

namespace {

constexpr int kBlockVectors = kPanelRows;  // a vector holds a row of a block's weights

using Block = U32x16[kBlockVectors];

// Tiles 0 to 3 are sums, 4 and 5 hold activations, 6 and 7 weights. Tiles 0, 1 and 4 belong to the
// first tokens, 2, 3 and 5 to the second ones.
class RunTiles : public Tiles {
  public:
    void configure(int first, int second) {
        if (first == first_ && second == second_) return;
        Shapes shapes;
        for (int tile = 0; tile < 8; ++tile) {
            const bool is_first = tile == 0 || tile == 1 || tile == 4;
            shapes.row_bytes[tile] = tile >= 6 ? 64 : 4 * (is_first ? first : second);
            shapes.rows[tile] = kTileRows;
        }
        load(shapes);
        first_ = first, second_ = second;
    }

  private:
    int first_ = 0, second_ = 0;
};

// The activations of up to sixteen tokens, packed: by pair of columns, then by token.
struct Run {
    const std::uint32_t* pairs;
    int num_tokens;

    const std::uint32_t* block(std::int64_t index) const {
        return pairs + index * kTileRows * num_tokens;
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
        return {pairs_.data() + first * padded_pairs_,
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
            for (std::int64_t at = 0; at < layout.padded_group(); at += kTiledColumns) {
                const std::int64_t count = std::clamp<std::int64_t>(columns - at, 0, kTiledColumns);
                pack_block(target, first + at, layout.num_columns, num_tokens, count);
                target += kTileRows * num_tokens;
            }
            first += columns;
        }
    }

    static void pack_block(std::uint32_t* target, const Bf16* src, std::int64_t stride,
                           std::int64_t num_tokens, std::int64_t num_columns) {
        F32x16 rows[kTileRows] = {};
        for (std::int64_t t = 0; t < num_tokens; ++t)
            std::memcpy(&rows[t], src + t * stride, num_columns * sizeof(Bf16));
        if (num_tokens == 1) {
            std::memcpy(target, rows, sizeof rows[0]);
            return;
        }
        transpose(rows);
        for (int pair = 0; pair < kTileRows; ++pair, target += num_tokens)
            std::memcpy(target, &rows[pair], num_tokens * sizeof *target);
    }

    std::int64_t padded_pairs_ = 0;
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
            else if constexpr (FORMAT == NumberFormat::kInt4)
                zero = __builtin_convertvector((I32x16)zero_extend(after + v * kLanes), F32x16);
            if constexpr (FORMAT == NumberFormat::kInt4 && !kSubtractsFirst) zero *= -scale;
            std::memcpy(scales + v * kLanes, &scale, sizeof scale);
            std::memcpy(zeros + v * kLanes, &zero, sizeof zero);
        }
    }

    // The values of the sixteen codes in a row.
    __m512 values(__m512 codes, int row) const {
        const __m512 scale = _mm512_set1_ps(scales[row]), zero = _mm512_set1_ps(zeros[row]);
        if constexpr (FORMAT == NumberFormat::kMxfp4) return _mm512_mul_ps(codes, scale);
        if constexpr (kSubtractsFirst) return _mm512_mul_ps(_mm512_sub_ps(codes, zero), scale);
        return _mm512_fmadd_ps(codes, scale, zero);
    }

  private:
    // Zero points times scales of 16 bits are exact, those of 32 bits are not.
    static constexpr bool kSubtractsFirst =
        FORMAT == NumberFormat::kInt4 && SCALE == ScaleType::kFloat32;
};

template <NumberFormat FORMAT>
__m512 code_values() {
    alignas(64) float codes[kLanes];
    for (int code = 0; code < kLanes; ++code)
        codes[code] = FORMAT == NumberFormat::kMxfp4 ? float(kFp4Bytes[code] - kFp4Zero) : code;
    return _mm512_load_ps(codes);
}

// Dequantizes 64 rows by 32 columns. A table of two rows' values is looked up by 32 codes at once.
template <NumberFormat FORMAT, ScaleType SCALE>
inline void dequantize(Block& block, const GroupHeader<FORMAT, SCALE>& header, __m512 codes,
                       const std::uint8_t* numbers) {
    const __m512i code_bits = _mm512_set1_epi16(15), second_row = _mm512_set1_epi16(16);
    for (int row = 0; row < kPanelRows; row += 4, numbers += sizeof(U32x16)) {
        prefetch_ahead(reinterpret_cast<const U32x16*>(numbers), 1);
        const __m512i words = _mm512_loadu_si512(numbers);  // each has the codes of four rows
        for (int i = 0; i < 4; i += 2) {
            const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(header.values(codes, row + i + 1),
                                                               header.values(codes, row + i));
            const __m512i first = _mm512_and_si512(_mm512_srli_epi16(words, 4 * i), code_bits);
            const __m512i second = _mm512_or_si512(
                _mm512_and_si512(_mm512_srli_epi16(words, 4 * i + 4), code_bits), second_row);
            block[row + i] = (U32x16)_mm512_permutexvar_epi16(first, table);
            block[row + i + 1] = (U32x16)_mm512_permutexvar_epi16(second, table);
        }
    }
}

// Calls step(index, block) for each block of 32 columns of a panel, after dequantizing it.
template <NumberFormat FORMAT, ScaleType SCALE, typename Target, typename Step>
inline void for_each_block(const QuantizedLayout& layout, const std::uint8_t* packed,
                           std::int64_t panel, Target target, Step step) {
    constexpr std::int64_t kHeaderBytes = header_bytes_of(FORMAT, SCALE);
    const std::int64_t blocks = layout.padded_group() / kTiledColumns;
    const __m512 codes = code_values<FORMAT>();
    for (std::int64_t group = 0; group < layout.num_groups(); ++group) {
        const std::uint8_t* at = packed + layout.group_at(panel, group);
        prefetch_ahead(reinterpret_cast<const U32x16*>(at), kHeaderBytes / sizeof(U32x16));
        const GroupHeader<FORMAT, SCALE> header(at);
        at += kHeaderBytes;
        for (std::int64_t i = 0; i < blocks; ++i, at += kBlockVectors * kTiledColumns / 2) {
            Block& block = target(group * blocks + i);
            dequantize<FORMAT, SCALE>(block, header, codes, at);
            step(group * blocks + i, block);
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
inline void add_block(const Block& block, const Run& run, std::int64_t index) {
    constexpr std::int64_t kNext = sizeof(U32x16);
    compiler_barrier();
    _tile_loadd(4, run.block(index), run.stride());
    _tile_loadd(6, block, kNext);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(7, block + kTileRows, kNext);
    _tile_dpbf16ps(1, 7, 4);
    _tile_loadd(6, block + 2 * kTileRows, kNext);
    _tile_dpbf16ps(2, 6, 4);
    _tile_loadd(7, block + 3 * kTileRows, kNext);
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
    tiles.configure(run.num_tokens, run.num_tokens);
    alignas(64) Block blocks[2];
    zero_sums();
    std::int64_t last = -1;
    for_each_block<FORMAT, SCALE>(
        p.layout, static_cast<const std::uint8_t*>(p.matrix.packed), panel,
        [&](std::int64_t index) -> Block& { return blocks[index % 2]; },
        [&](std::int64_t index, const Block&) {
            if (index > 0) add_block(blocks[(index - 1) % 2], run, index - 1);
            last = index;
        });
    add_block(blocks[last % 2], run, last);
    alignas(64) Sums sums;
    store_run(sums);
    store_sums(p, panel, p.first, run.num_tokens, sums);
}

// Multiplies half of a panel by two runs. Tiles 0 and 1 are sums of the first run, 2 and 3 those of
// the second run.
inline void multiply_half(RunTiles& tiles, const Block* blocks, std::int64_t num_blocks, int half,
                          const Run& first, const Run& second, Sums& first_sums,
                          Sums& second_sums) {
    constexpr std::int64_t kNext = sizeof(U32x16), kNextSums = sizeof first_sums[0];
    const int row = half * 2 * kTileRows;
    zero_sums();
    for (std::int64_t index = 0; index < num_blocks; ++index) {
        const U32x16* const rows = blocks[index] + row;
        _tile_loadd(4, first.block(index), first.stride());
        _tile_loadd(6, rows, kNext);
        insert_nops();
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(7, rows + kTileRows, kNext);
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
    thread_local AlignedVector<U32x16> dequantized;
    const std::int64_t num_blocks = p.layout.padded_columns() / kTiledColumns;
    dequantized.resize(std::size_t(num_blocks * kBlockVectors));
    auto* const blocks = reinterpret_cast<Block*>(dequantized.data());
    for_each_block<FORMAT, SCALE>(
        p.layout, static_cast<const std::uint8_t*>(p.matrix.packed), panel,
        [&](std::int64_t index) -> Block& { return blocks[index]; },
        [](std::int64_t, const Block&) {});
    alignas(64) Sums sums[2];
    for (std::int64_t first = p.first; first < p.end; first += 2 * kTileRows) {
        const std::int64_t middle = first + kTileRows;
        const Run upper = p.activations.run(first, p.end);
        if (middle >= p.end) {
            tiles.configure(upper.num_tokens, upper.num_tokens);
            zero_sums();
            for (std::int64_t i = 0; i < num_blocks; ++i) add_block(blocks[i], upper, i);
            store_run(sums[0]);
        } else {
            const Run lower = p.activations.run(middle, p.end);
            tiles.configure(upper.num_tokens, lower.num_tokens);
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

// By ScaleType.
template <NumberFormat FORMAT>
constexpr MultiplyPanel kMultiply[] = {multiply_panel<FORMAT, ScaleType::kFloat32>,
                                       multiply_panel<FORMAT, ScaleType::kBfloat16>,
                                       multiply_panel<FORMAT, ScaleType::kFloat16>};

MultiplyPanel multiply_of(const QuantizedLayout& layout) {
    const int scale = int(layout.scale_type);
    if (layout.format == NumberFormat::kInt4) return kMultiply<NumberFormat::kInt4>[scale];
    if (layout.format == NumberFormat::kInt4Offsets)
        return kMultiply<NumberFormat::kInt4Offsets>[scale];
    return multiply_panel<NumberFormat::kMxfp4, ScaleType::kFloat32>;
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
    WorkQueue queue(args.num_matrices * panels, passes, args.num_threads);
    ThreadPool::instance().run(args.num_threads, [&](int i, int) {
        RunTiles tiles;
        for (WorkQueue::Unit unit; queue.next(i, unit);) {
            const std::int64_t index = unit.index / panels;
            const std::int64_t first = args.row_offsets[index] + unit.pass * pass_tokens;
            const std::int64_t end = std::min(first + pass_tokens, args.row_offsets[index + 1]);
            if (first >= end) continue;
            const Gemm gemm{layout, args.matrices[index], activations, args.dst, first,
                            end,    is_streamed};
            multiply_of(layout)(gemm, tiles, unit.index % panels);
        }
        if (is_streamed) streaming_fence();
    });
}

}  // namespace baton::dequantized

#endif
