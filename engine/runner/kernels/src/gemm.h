// GEMMs with packed matrices, by format and by what the processor multiplies. `linear.cpp` selects.
#pragma once

#include "abi.h"

namespace baton {

// GEMMs with matrices of equal shape and bits, in one round of the thread pool. Matrix i multiplies
// the rows of src from row_offsets[i] up to row_offsets[i + 1].
struct GroupedLinear {
    const PackedMatrix* matrices;
    const std::int64_t* row_offsets;
    std::int64_t num_matrices;
    const Bf16* src;  // [rows, columns]
    Bf16* dst;        // [rows, rows of a matrix]
    std::int32_t num_threads;

    std::int64_t num_rows() const { return row_offsets[num_matrices]; }
};

void linear(const GroupedLinear& args);

}  // namespace baton

namespace baton::bf16 {

std::int64_t packed_bytes(const PackedMatrix& matrix);
void pack(const PackArgs& args);
void get_rows(const PackedMatrix& matrix, const std::int64_t* row_ids, std::int64_t count,
              Bf16* dst);
void linear(const GroupedLinear& args);

}  // namespace baton::bf16

#if defined(__AVX2__) && !defined(__AVX512BF16__)

namespace baton::int13 {

std::int64_t packed_bytes(const PackedMatrix& matrix);
void pack(const PackArgs& args);
void linear(const GroupedLinear& args);

}  // namespace baton::int13

#endif

#if defined(__AMX_BF16__)

namespace baton::dequantized {

void linear(const GroupedLinear& args);

}  // namespace baton::dequantized

#endif

namespace baton::int8_activations {

void linear(const GroupedLinear& args);

}  // namespace baton::int8_activations

namespace baton::quantized {

std::int64_t packed_bytes(const PackedMatrix& matrix);
void pack(const PackArgs& args);
void get_rows(const PackedMatrix& matrix, const std::int64_t* row_ids, std::int64_t count,
              Bf16* dst);
void linear(const GroupedLinear& args);

}  // namespace baton::quantized
