// GEMM with packed weights of 4 or 8 bits, for AVX2: sixteen rows of a panel at a time.
//
// Activations are 16-bit integers here. The sum of a segment is an exact 32-bit integer; segments
// are added as float32 in the order of the columns.
#pragma once

#include "gemm_quantized.h"

namespace baton::quantized {

// Weights of sixteen rows, as 16-bit numbers: a pair of columns per row.
struct Weights {
    __m256i first, second;
};

// Each word has the columns of a quad (int8) or of two quads (4 bits). The parts of a quad are its
// even and its odd columns.
template <NumberFormat FORMAT, int PART>
BATON_INLINE __m256i unpack(const std::uint8_t* words) {
    const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    if constexpr (bits_of(FORMAT) == 4 && FORMAT != NumberFormat::kMxfp4) {
        constexpr int kShift = PART % 2 * 8 + PART / 2 * 4;
        const __m256i shifted = _mm256_srli_epi16(numbers, kShift);
        return kShift == 12 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi16(15));
    }
    __m256i bytes = numbers;
    if constexpr (FORMAT == NumberFormat::kMxfp4) {
        const __m256i codes = PART < 2 ? numbers : _mm256_srli_epi16(numbers, 4);
        bytes = (__m256i)fp4_bytes((U32x8)_mm256_and_si256(codes, _mm256_set1_epi8(15)));
    }
    return PART % 2 == 0 ? _mm256_and_si256(bytes, _mm256_set1_epi16(255))
                         : _mm256_srli_epi16(bytes, 8);
}

// Scales, and zero points or offsets, of a group, for sixteen rows of a panel.
template <NumberFormat FORMAT, ScaleType SCALE>
struct GroupHeader {
    __m256 scales[2], offsets[2];
    __m256i zeros[2];

    GroupHeader(const std::uint8_t* group, int v) {
        for (int i = 0; i < 2; ++i) {
            const int row = v * kLanes + 8 * i;
            if constexpr (FORMAT == NumberFormat::kMxfp4) {
                const __m256i exponents = widen(group + row);
                const __m256 powers = _mm256_castsi256_ps(_mm256_slli_epi32(exponents, 23));
                scales[i] = _mm256_mul_ps(_mm256_max_ps(powers, _mm256_set1_ps(0x1p-127f)),
                                          _mm256_set1_ps(0.5f));
            } else {
                constexpr std::int64_t kZeros = zeros_offset_of(FORMAT, SCALE);
                scales[i] = load_scales(group, row);
                if constexpr (has_offsets(FORMAT)) {
                    offsets[i] = load_scales(group + kZeros, row);
                } else {
                    zeros[i] = widen(group + kZeros + row);
                }
            }
        }
    }

    __m256 dequantize(__m256i dots, std::int32_t activation_sum, int i, __m256 total) const {
        if constexpr (has_offsets(FORMAT)) {
            total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scales[i], total);
            return _mm256_fmadd_ps(_mm256_set1_ps(float(activation_sum)), offsets[i], total);
        }
        const __m256i offset =
            FORMAT == NumberFormat::kMxfp4
                ? _mm256_set1_epi32(kFp4Zero * activation_sum)
                : _mm256_mullo_epi32(zeros[i], _mm256_set1_epi32(activation_sum));
        const __m256 number = _mm256_cvtepi32_ps(_mm256_sub_epi32(dots, offset));
        return _mm256_fmadd_ps(number, scales[i], total);
    }

  private:
    static __m256 load_scales(const std::uint8_t* group, int row) {
        if constexpr (SCALE == ScaleType::kFloat32)
            return _mm256_loadu_ps(reinterpret_cast<const float*>(group) + row);
        const __m128i halves =
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(group + row * sizeof(Bf16)));
        if constexpr (SCALE == ScaleType::kFloat16) return _mm256_cvtph_ps(halves);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    static __m256i widen(const std::uint8_t* bytes) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    }
};

// A segment's activations of some tokens: a word has a pair of columns.
struct SegmentActivations {
    const std::uint32_t* words;
    const std::int32_t* sums;
    std::int64_t stride, sum_stride;  // from one token to the next
};

// Integer sums of TOKENS tokens for sixteen rows of a panel.
template <int TOKENS>
struct SegmentSums {
    __m256i first = {}, second = {};
    SegmentSums<TOKENS - 1> others;

    BATON_INLINE void add(const std::uint32_t* activations, std::int64_t stride, Weights weights) {
        const __m256i pair = _mm256_set1_epi32(int(*activations));
        first = _mm256_add_epi32(first, _mm256_madd_epi16(weights.first, pair));
        second = _mm256_add_epi32(second, _mm256_madd_epi16(weights.second, pair));
        others.add(activations + stride, stride, weights);
    }
    template <typename Header>
    BATON_INLINE void dequantize(float* sums, const SegmentActivations& activations,
                                 const Header& header, int token = 0) const {
        const std::int32_t sum = activations.sums[token * activations.sum_stride];
        _mm256_storeu_ps(sums, header.dequantize(first, sum, 0, _mm256_loadu_ps(sums)));
        _mm256_storeu_ps(sums + 8, header.dequantize(second, sum, 1, _mm256_loadu_ps(sums + 8)));
        others.dequantize(sums + kPanelRows, activations, header, token + 1);
    }
};

template <>
struct SegmentSums<0> {
    BATON_INLINE void add(const std::uint32_t*, std::int64_t, Weights) {}
    template <typename Header>
    BATON_INLINE void dequantize(float*, const SegmentActivations&, const Header&, int) const {}
};

// A segment of a group, in a panel.
struct Segment {
    const std::uint8_t *group, *words;
    std::int64_t num_words;
};

// sums += activations * a segment, for all rows of a panel. Prefetches what follows if IS_FETCHING.
template <NumberFormat FORMAT, ScaleType SCALE, int TOKENS, bool IS_FETCHING>
void add_segment(float* sums, const SegmentActivations& activations, const Segment& segment) {
    constexpr int kParts = 16 / bits_of(FORMAT);
    const std::int64_t distance = std::max<std::int64_t>(4096, segment.num_words * 256);
    const std::uint8_t* ahead = segment.words + distance;
    for (int v = 0; v < kVectors; ++v) {
        SegmentSums<TOKENS> dots;
        const std::uint8_t* words = segment.words + v * sizeof(U32x16);
        const std::uint32_t* pairs = activations.words;
        if (IS_FETCHING)
            for (std::int64_t at = v * 64; at < header_bytes_of(FORMAT, SCALE); at += 4 * 64)
                __builtin_prefetch(segment.group + distance + at, 0, 2);
        for (std::int64_t i = 0; i < segment.num_words; ++i, pairs += kParts) {
            if (IS_FETCHING) __builtin_prefetch(ahead, 0, 2), ahead += 64;
            const auto add = [&]<int PART>(std::integral_constant<int, PART>) {
                if constexpr (PART < kParts)
                    dots.add(pairs + PART, activations.stride,
                             {unpack<FORMAT, PART>(words), unpack<FORMAT, PART>(words + 32)});
            };
            add(std::integral_constant<int, 0>{});
            add(std::integral_constant<int, 1>{});
            add(std::integral_constant<int, 2>{});
            add(std::integral_constant<int, 3>{});
            words += kVectors * sizeof(U32x16);
        }
        dots.dequantize(sums + v * kLanes, activations,
                        GroupHeader<FORMAT, SCALE>(segment.group, v));
    }
}

using AddSegment = void (*)(float*, const SegmentActivations&, const Segment&);

template <NumberFormat FORMAT, ScaleType SCALE, bool IS_FETCHING>
constexpr AddSegment kAddSegment[] = {
    nullptr,
    add_segment<FORMAT, SCALE, 1, IS_FETCHING>,
    add_segment<FORMAT, SCALE, 2, IS_FETCHING>,
    add_segment<FORMAT, SCALE, 3, IS_FETCHING>,
    add_segment<FORMAT, SCALE, 4, IS_FETCHING>,
    add_segment<FORMAT, SCALE, 5, IS_FETCHING>,
    add_segment<FORMAT, SCALE, 6, IS_FETCHING>,
};

constexpr std::int64_t kPassTokens = 32 * kMaxRows;  // their sums stay in L2

// Multiplies the tokens from `first` up to `end` by a panel. The first run of tokens prefetches.
template <NumberFormat FORMAT, ScaleType SCALE>
void multiply_pass(const Gemm& p, QuantizedActivations& activations, std::int64_t panel,
                   std::int64_t first, std::int64_t end) {
    const QuantizedLayout& layout = p.layout;
    F32x16 sums[kPassTokens][kVectors];
    std::memset(sums, 0, sizeof sums[0] * (end - first));
    for (std::int64_t index = 0; index < layout.num_segments(); ++index) {
        const std::int64_t group = index / layout.segments_per_group();
        const std::int64_t column = index % layout.segments_per_group() * kSegmentColumns;
        const std::uint8_t* const at = p.packed + layout.group_at(panel, group);
        const std::int64_t count = std::min(kSegmentColumns, layout.padded_group() - column);
        const Segment segment{at, at + layout.byte_at(0, column), count * layout.bits / 32};
        bool is_first = true;
        for (std::int64_t token = first, tokens; token < end; token += tokens, is_first = false) {
            tokens = next_run(end - token);
            const auto add =
                is_first ? kAddSegment<FORMAT, SCALE, true> : kAddSegment<FORMAT, SCALE, false>;
            add[tokens](reinterpret_cast<float*>(sums[token - first]),
                        {activations.pairs(token) + (group * layout.padded_group() + column) / 2,
                         activations.segment_sums(token) + index, activations.stride() / 2,
                         layout.num_segments()},
                        segment);
        }
    }
    for (std::int64_t token = first; token < end; ++token) {
        for (F32x16& total : sums[token - first]) total *= activations.scale(token);
        store_row(sums[token - first], p.bias, p.dst + token * layout.num_rows, panel,
                  layout.num_rows);
    }
}

template <NumberFormat FORMAT, ScaleType SCALE>
void multiply_panel(const Gemm& p, QuantizedActivations& activations, std::int64_t panel) {
    for (std::int64_t first = p.first; first < p.end; first += kPassTokens)
        multiply_pass<FORMAT, SCALE>(p, activations, panel, first,
                                     std::min(first + kPassTokens, p.end));
}

}  // namespace baton::quantized
