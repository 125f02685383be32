// A GEMM with packed weights of 4 or 8 bits.
#pragma once

#include "microkernel.h"
#include "quantization.h"

namespace baton::quantized {

// The tokens from `first` up to `end` times a matrix.
struct Gemm {
    QuantizedLayout layout;
    const std::uint8_t* packed;
    const Bf16* bias;  // or null
    Bf16* dst;         // [tokens, rows]
    std::int64_t first, end;
};

}  // namespace baton::quantized
