// A decoder layer in one call. With few tokens, Python's overhead between the operations of a layer
// would be as long as some of them, and the pool's threads would fall asleep meanwhile.

#include "calls.h"
#include "panels.h"

using namespace baton;

namespace {

struct Matrix {
    const void* packed;
    const Bf16* bias;                                 // or null
    std::int64_t bits, num_rows, num_columns, group;  // bits: 16 if not quantized
};

// The structs Matrix, Layer and Pass must match those of `native_layers.py`.
struct Layer {
    const Bf16 *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm, k_norm: or null
    Matrix qkv, output, gate_up, down;
    std::int64_t index, num_heads, window;  // window: 0 for none
    float epsilon;
};

// Tokens of a pass, the layout of their sequences, and buffers for intermediate results.
struct Pass {
    Bf16* blocks;
    std::int64_t num_layers, num_kv_heads, block_size, head_dim;
    const std::int64_t *write_blocks, *write_offsets;               // by token
    const std::int64_t *tables, *lengths, *starts, *num_queries;  // by sequence
    std::int64_t table_stride, num_sequences, num_single, num_tokens;
    const Bf16 *cosines, *sines;
    // Each [tokens, ..]: hidden size or query rows; qkv or gate and up; rotated heads or gated.
    Bf16 *narrow_buf, *wide_buf, *heads_buf;
    float scale;
    int num_threads;
};

// The rows of a matrix from `first` on, which must be the first row of a panel.
Matrix rows_from(const Matrix& matrix, std::int64_t first) {
    const auto* packed = static_cast<const Bf16*>(matrix.packed) + first * matrix.num_columns;
    const Bf16* bias = matrix.bias == nullptr ? nullptr : matrix.bias + first;
    return {packed, bias, matrix.bits, matrix.num_rows - first, matrix.num_columns, matrix.group};
}

void multiply(const Matrix& matrix, const Bf16* src, Bf16* dst, const Pass& pass) {
    if (matrix.bits == 16)
        return baton_linear(src, matrix.packed, matrix.bias, dst, pass.num_tokens,
                            matrix.num_rows, matrix.num_columns, pass.num_threads);
    baton_quantized_linear(src, static_cast<const std::uint8_t*>(matrix.packed), matrix.bias,
                           dst, pass.num_tokens, matrix.bits, matrix.num_rows,
                           matrix.num_columns, matrix.group, pass.num_threads);
}

void norm(const Bf16* src, const Bf16* weight, Bf16* dst, const Layer& layer,
          const Pass& pass) {
    baton_norm(src, weight, dst, pass.num_tokens, layer.qkv.num_columns, layer.epsilon,
               pass.num_threads);
}

void attend(const Layer& layer, const Pass& pass, const Bf16* queries, Bf16* dst) {
    const std::int64_t gqa_group_size = layer.num_heads / pass.num_kv_heads;
    if (pass.num_single)
        baton_attend_singles(pass.blocks, pass.num_layers, pass.num_kv_heads, pass.block_size,
                             pass.head_dim, layer.index, queries, dst, pass.tables,
                             pass.table_stride, pass.lengths, layer.window, pass.num_single,
                             gqa_group_size, pass.scale, pass.num_threads);
    for (std::int64_t which = pass.num_single; which < pass.num_sequences; ++which) {
        const std::int64_t first = pass.starts[which] * layer.num_heads * pass.head_dim;
        baton_attend_chunk(pass.blocks, pass.num_layers, pass.num_kv_heads, pass.block_size,
                           pass.head_dim, layer.index, queries + first, dst + first,
                           pass.tables + which * pass.table_stride, pass.num_queries[which],
                           pass.lengths[which], layer.window, gqa_group_size, pass.scale,
                           pass.num_threads);
    }
}

void rotate(const Layer& layer, const Pass& pass, const Bf16* src, std::int64_t stride,
            const Bf16* weight, std::int64_t num_heads, Bf16* dst) {
    baton_rotate(src, stride, weight, pass.cosines, pass.sines, dst, pass.num_tokens,
                 num_heads, pass.head_dim, layer.epsilon, pass.num_threads);
}

// Rotates the keys and writes keys and values to the cache. A token's values follow its keys.
void write(const Layer& layer, const Pass& pass, const Bf16* keys, std::int64_t stride) {
    const std::int64_t count = pass.num_kv_heads * pass.head_dim;
    rotate(layer, pass, keys, stride, layer.k_norm, pass.num_kv_heads, pass.heads_buf);
    baton_write_kv(pass.blocks, pass.num_layers, pass.num_kv_heads, pass.block_size, pass.head_dim,
                   layer.index, pass.heads_buf, count, keys + count, stride, pass.write_blocks,
                   pass.write_offsets, pass.num_tokens, pass.num_threads);
}

}  // namespace

extern "C" {

// Computes a layer in place. hidden: [tokens, hidden_size].
void baton_layer(const Layer* layer, const Pass* pass, Bf16* hidden) {
    const std::int64_t count = pass->num_tokens * layer->qkv.num_columns;
    const std::int64_t stride = layer->qkv.num_rows, query_rows = layer->num_heads * pass->head_dim;
    norm(hidden, layer->input_norm, pass->narrow_buf, *layer, *pass);
    multiply(layer->qkv, pass->narrow_buf, pass->wide_buf, *pass);
    write(*layer, *pass, pass->wide_buf + query_rows, stride);
    rotate(*layer, *pass, pass->wide_buf, stride, layer->q_norm, layer->num_heads, pass->heads_buf);
    attend(*layer, *pass, pass->heads_buf, pass->narrow_buf);
    multiply(layer->output, pass->narrow_buf, pass->wide_buf, *pass);
    baton_add(hidden, pass->wide_buf, count, pass->num_threads);

    norm(hidden, layer->post_norm, pass->narrow_buf, *layer, *pass);
    multiply(layer->gate_up, pass->narrow_buf, pass->wide_buf, *pass);
    baton_gate(pass->wide_buf, pass->heads_buf, pass->num_tokens, layer->down.num_columns,
               pass->num_threads);
    multiply(layer->down, pass->heads_buf, pass->narrow_buf, *pass);
    baton_add(hidden, pass->narrow_buf, count, pass->num_threads);
}

// Computes only the layer's keys and values and writes them to the cache.
void baton_layer_write(const Layer* layer, const Pass* pass, const Bf16* hidden) {
    const std::int64_t query_rows = layer->num_heads * pass->head_dim;
    const bool skips_queries = layer->qkv.bits == 16 && query_rows % kPanelRows == 0;
    const Matrix matrix = skips_queries ? rows_from(layer->qkv, query_rows) : layer->qkv;
    norm(hidden, layer->input_norm, pass->narrow_buf, *layer, *pass);
    multiply(matrix, pass->narrow_buf, pass->wide_buf, *pass);
    write(*layer, *pass, pass->wide_buf + (skips_queries ? 0 : query_rows), matrix.num_rows);
}

}  // extern "C"
