// Linear layers and embedding tables, in bf16 or quantized.

#include "gemm.h"
#include "quantization.h"

#include <vector>

using namespace baton;

namespace baton {

void linear(const GroupedLinear& args) {
    const PackedMatrix& first = args.matrices[0];
    if (first.bits == 16) return bf16::linear(args);
#if defined(__AVX2__) && !defined(__AVX512BF16__)
    if (first.bits == 13) return int13::linear(args);
#endif
    if (first.activation_bits == 8) return int8_activations::linear(args);
#if defined(__AMX_BF16__)
    if (QuantizedLayout(first).is_tiled()) return dequantized::linear(args);
#endif
    quantized::linear(args);
}

}  // namespace baton

extern "C" {

std::int64_t baton_packed_bytes(const PackedMatrix* matrix) {
#if defined(__AVX2__) && !defined(__AVX512BF16__)
    if (matrix->bits == 13) return int13::packed_bytes(*matrix);
#endif
    return matrix->bits == 16 ? bf16::packed_bytes(*matrix) : quantized::packed_bytes(*matrix);
}

void baton_pack(const PackArgs* args) {
#if defined(__AVX2__) && !defined(__AVX512BF16__)
    if (args->matrix.bits == 13) return int13::pack(*args);
#endif
    args->matrix.bits == 16 ? bf16::pack(*args) : quantized::pack(*args);
}

void baton_get_rows(const PackedMatrix* matrix, const std::int64_t* row_ids, std::int64_t count,
                    Bf16* dst) {
    const auto get_rows = matrix->bits == 16 ? bf16::get_rows : quantized::get_rows;
    get_rows(*matrix, row_ids, count, dst);
}

void baton_linear(const LinearArgs* args) {
    const std::int64_t row_offsets[] = {0, args->num_tokens};
    linear({.matrices = &args->matrix,
            .row_offsets = row_offsets,
            .num_matrices = 1,
            .src = args->src,
            .dst = args->dst,
            .num_threads = args->num_threads});
}

void baton_head_linear(const HeadLinearArgs* args) {
    std::vector<std::int64_t> row_offsets(args->num_heads + 1);
    for (std::int64_t head = 0; head < args->num_heads; ++head)
        row_offsets[head + 1] = row_offsets[head] + args->num_tokens;
    linear({.matrices = args->matrices,
            .row_offsets = row_offsets.data(),
            .num_matrices = args->num_heads,
            .src = args->src,
            .dst = args->dst,
            .num_threads = args->num_threads});
}

}  // extern "C"
