// The two formats of packed matrices. `linear.cpp` selects one by `PackedMatrix::bits`.
#pragma once

#include "abi.h"

namespace baton::bf16 {

std::int64_t packed_bytes(const PackedMatrix& matrix);
void pack(const PackArgs& args);
void get_rows(const PackedMatrix& matrix, const std::int64_t* row_ids, std::int64_t count,
              Bf16* dst);
void linear(const LinearArgs& args);

}  // namespace baton::bf16

namespace baton::quantized {

std::int64_t packed_bytes(const PackedMatrix& matrix);
void pack(const PackArgs& args);
void get_rows(const PackedMatrix& matrix, const std::int64_t* row_ids, std::int64_t count,
              Bf16* dst);
void linear(const LinearArgs& args);

}  // namespace baton::quantized
