// GEMM with weights and activations that are rounded from bf16 to integers of 13 bits, for AVX2: it
// multiplies 16-bit integers 1.6 times as fast as float32. The errors are smaller than those of
// rounding the output to bf16.
//
// Segments of 128 columns of a row, and of a token, have a scale each. The sum of a segment is an
// exact 32-bit integer; segments are added as float32 in the order of the columns. So a token has
// the same bits in any batch.

#if defined(__AVX2__) && !defined(__AVX512BF16__)

#include "gemm.h"
#include "microkernel.h"
#include "thread_pool.h"

#include <algorithm>

namespace baton::int13 {

namespace {

constexpr float kMax = 4095;            // 128 products of two such numbers add up to less than 2^31
constexpr std::int64_t kColumns = 128;  // of a segment
constexpr std::int64_t kPassTokens = 32 * kMaxRows;  // their sums stay in L2

// A panel is a run of segments: the scales of its rows, then pairs of columns as in `panels.h`.
std::int64_t num_segments(std::int64_t num_columns) {
    return (num_columns + kColumns - 1) / kColumns;
}

std::int64_t panel_words(std::int64_t num_columns) {
    return kPanelRows * (num_segments(num_columns) + (num_columns + 1) / 2);
}

std::uint32_t* panel_at(const PackedMatrix& matrix, std::int64_t panel) {
    return static_cast<std::uint32_t*>(matrix.packed) + panel * panel_words(matrix.num_columns);
}

// Rounds the numbers of a segment, padded with zeros, and returns their scale. A non-finite number
// makes the scale, and so the whole output row, non-finite.
float quantize(const Bf16* src, std::int64_t count, std::int16_t* numbers) {
    alignas(64) float wide[kColumns] = {};
    FloatBlock::load(src, wide, std::min(kColumns, count));
    F32x16 highest{}, spoiled{};
    for (const float* at = wide; at < wide + kColumns; at += kLanes) {
        F32x16 some;
        std::memcpy(&some, at, sizeof some);
        highest = lane_max((F32x16)((U32x16)some & 0x7fffffffu), highest);
        spoiled += some * 0.0f;
    }
    const float largest = reduce_max(highest) + sum(spoiled);
    const bool is_usable = largest > 1e-30f && std::isfinite(largest);
    const __m256 factor = _mm256_set1_ps(is_usable ? kMax / largest : 0.0f);
    for (std::int64_t at = 0; at < kColumns; at += kLanes) {
        const auto whole = [&](std::int64_t first) {
            return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(wide + first), factor));
        };
        const __m256i shorts = _mm256_packs_epi32(whole(at), whole(at + 8));
        _mm256_store_si256(reinterpret_cast<__m256i*>(numbers + at),
                           _mm256_permute4x64_epi64(shorts, 0xd8));
    }
    return largest / kMax;
}

// Activations of all tokens: by segment, then by token.
class Activations {
  public:
    void resize(std::int64_t num_tokens, std::int64_t num_columns) {
        num_tokens_ = num_tokens, num_columns_ = num_columns;
        const std::size_t count = num_tokens * num_segments(num_columns);
        if (scales_.size() < count) scales_.resize(count), numbers_.resize(count * kColumns);
    }
    void quantize(std::int64_t token, const Bf16* src) {
        for (std::int64_t first = 0, segment = 0; first < num_columns_;
             first += kColumns, ++segment) {
            const std::int64_t place = segment * num_tokens_ + token;
            scales_[place] = int13::quantize(src + first, num_columns_ - first,
                                             numbers_.data() + place * kColumns);
        }
    }
    const std::int16_t* numbers(std::int64_t segment, std::int64_t token) const {
        return numbers_.data() + (segment * num_tokens_ + token) * kColumns;
    }
    const float* scales(std::int64_t segment, std::int64_t token) const {
        return scales_.data() + segment * num_tokens_ + token;
    }

  private:
    std::int64_t num_tokens_ = 0, num_columns_ = 0;
    AlignedVector<std::int16_t> numbers_;
    std::vector<float> scales_;
};

// Sums of TOKENS tokens for sixteen rows of a panel. GCC does not keep arrays in registers here.
template <int TOKENS>
struct Sums {
    __m256i first = {}, second = {};
    Sums<TOKENS - 1> others;

    BATON_INLINE void add(const std::int16_t* pair, __m256i left, __m256i right) {
        multiply_add_pair(first, second, pair, left, right);
        others.add(pair + kColumns, left, right);
    }
    BATON_INLINE void store(float* sums, const float* token_scales, __m256 low, __m256 high) const {
        const __m256 scale = _mm256_broadcast_ss(token_scales);
        add_scaled(sums, first, _mm256_mul_ps(low, scale));
        add_scaled(sums + 8, second, _mm256_mul_ps(high, scale));
        others.store(sums + kPanelRows, token_scales + 1, low, high);
    }

  private:
    BATON_INLINE static void add_scaled(float* sums, __m256i dots, __m256 scales) {
        const __m256 total = _mm256_loadu_ps(sums);
        _mm256_storeu_ps(sums, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scales, total));
    }
};

template <>
struct Sums<0> {
    BATON_INLINE void add(const std::int16_t*, __m256i, __m256i) {}
    BATON_INLINE void store(float*, const float*, __m256, __m256) const {}
};

// sums += tokens * sixteen rows of a segment of a panel. Prefetches one line for each pair if
// IS_FETCHING.
template <int TOKENS, bool IS_FETCHING>
void add_sixteen(float* sums, const std::int16_t* numbers, const float* token_scales,
                 const float* row_scales, const U32x16* words, std::int64_t pairs,
                 const U32x16* ahead) {
    Sums<TOKENS> dots;
    for (std::int64_t pair = 0; pair < pairs; ++pair, words += kVectors, numbers += 2) {
        if (IS_FETCHING) __builtin_prefetch(ahead + pair, 0, 2);
        const auto* const halves = reinterpret_cast<const __m256i*>(words);
        dots.add(numbers, _mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1));
    }
    dots.store(sums, token_scales, _mm256_loadu_ps(row_scales), _mm256_loadu_ps(row_scales + 8));
}

using AddSixteen = void (*)(float*, const std::int16_t*, const float*, const float*, const U32x16*,
                            std::int64_t, const U32x16*);

template <bool IS_FETCHING>
constexpr AddSixteen kAddSixteen[] = {
    nullptr,
    add_sixteen<1, IS_FETCHING>,
    add_sixteen<2, IS_FETCHING>,
    add_sixteen<3, IS_FETCHING>,
    add_sixteen<4, IS_FETCHING>,
    add_sixteen<5, IS_FETCHING>,
    add_sixteen<6, IS_FETCHING>,
};

// Multiplies the tokens from `first` up to `end` by a panel. The first run of tokens prefetches the
// next segment.
void multiply_panel(const PackedMatrix& matrix, const Activations& activations, std::int64_t panel,
                    std::int64_t first, std::int64_t end, Bf16* dst) {
    F32x16 sums[kPassTokens][kVectors];
    std::memset(sums, 0, sizeof sums[0] * (end - first));
    const std::uint32_t* words = panel_at(matrix, panel);
    for (std::int64_t column = 0; column < matrix.num_columns; column += kColumns) {
        const std::int64_t segment = column / kColumns;
        const std::int64_t pairs = (std::min(kColumns, matrix.num_columns - column) + 1) / 2;
        const auto* const scales = reinterpret_cast<const float*>(words);
        const auto* const numbers = reinterpret_cast<const U32x16*>(words + kPanelRows);
        const auto* const ahead = numbers + kVectors * pairs;
        for (std::int64_t token = first, count; token < end; token += count) {
            count = next_run(end - token);
            const auto add = token == first ? kAddSixteen<true>[count] : kAddSixteen<false>[count];
            for (int v = 0; v < kVectors; ++v)
                add(reinterpret_cast<float*>(&sums[token - first][v]),
                    activations.numbers(segment, token), activations.scales(segment, token),
                    scales + v * kLanes, numbers + v, pairs, ahead + v * pairs);
        }
        words += kPanelRows * (pairs + 1);
    }
    for (std::int64_t token = first; token < end; ++token)
        store_row(sums[token - first], matrix.bias, dst + token * matrix.num_rows, panel,
                  matrix.num_rows);
}

}  // namespace

std::int64_t packed_bytes(const PackedMatrix& matrix) {
    const std::int64_t panels = (matrix.num_rows + kPanelRows - 1) / kPanelRows;
    return panels * panel_words(matrix.num_columns) * std::int64_t(sizeof(std::uint32_t));
}

void pack(const PackArgs& args) {
    const PackedMatrix& matrix = args.matrix;
    const std::int64_t columns = matrix.num_columns;
    const auto pack_row = [&](std::int64_t row) {
        const Bf16* src = static_cast<const Bf16*>(args.weights) + row * columns;
        std::uint32_t* words = panel_at(matrix, row / kPanelRows) + row % kPanelRows;
        alignas(64) std::int16_t numbers[kColumns];
        for (std::int64_t at = 0; at < columns; at += kColumns, words += kPanelRows) {
            const float scale = quantize(src + at, columns - at, numbers);
            std::memcpy(words, &scale, sizeof scale);
            for (std::int64_t i = 0; i < std::min(kColumns, columns - at); i += 2)
                std::memcpy(words += kPanelRows, numbers + i, sizeof *words);
        }
    };
    parallel_for(matrix.num_rows, columns, args.num_threads,
                 [&](std::int64_t row, std::int64_t end) {
                     for (; row < end; ++row) pack_row(row);
                 });
}

void linear(const GroupedLinear& args) {
    thread_local Activations buffer;
    Activations& activations = buffer;  // all threads use that of the calling thread
    const std::int64_t num_columns = args.matrices[0].num_columns;
    activations.resize(args.num_rows(), num_columns);
    parallel_for(args.num_rows(), num_columns, args.num_threads,
                 [&](std::int64_t row, std::int64_t end) {
                     for (; row < end; ++row)
                         activations.quantize(row, args.src + row * num_columns);
                 });
    const std::int64_t panels = (args.matrices[0].num_rows + kPanelRows - 1) / kPanelRows;
    std::int64_t max_tokens = 1;
    for (std::int64_t i = 0; i < args.num_matrices; ++i)
        max_tokens = std::max(max_tokens, args.row_offsets[i + 1] - args.row_offsets[i]);
    WorkQueue queue(args.num_matrices * panels, (max_tokens + kPassTokens - 1) / kPassTokens,
                    args.num_threads);
    run_parallel(args.num_threads, [&](int i, int) {
        for (WorkQueue::Unit unit; queue.next(i, unit);) {
            const std::int64_t index = unit.index / panels;
            const std::int64_t first = args.row_offsets[index] + unit.pass * kPassTokens;
            const std::int64_t end = std::min(first + kPassTokens, args.row_offsets[index + 1]);
            if (first < end)
                multiply_panel(args.matrices[index], activations, unit.index % panels, first, end,
                               args.dst);
        }
    });
}

}  // namespace baton::int13

#endif
