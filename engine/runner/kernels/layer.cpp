// A layer of a decoder in one call. With few tokens what Python does between its parts takes as
// long as some of them, and lets the threads that wait for the next part fall asleep.

#include "calls.h"
#include "panels.h"

using namespace baton;

namespace {

struct Matrix {
    const void* packed;
    const Bf16* bias;                                 // or null
    std::int64_t bits, num_rows, num_columns, group;  // bits: 16 if it is not quantised
};

// Keep these as `native_layers.py` has them.
struct Layer {
    const Bf16 *input_norm, *q_norm, *k_norm, *post_norm;  // those of queries and keys or null
    Matrix qkv, output, gate_up, down;
    std::int64_t index, num_heads, window;  // no window: 0
    float epsilon;
};

// The tokens, where their sequences lie, and room for what is between two parts.
struct Pass {
    Bf16* blocks;
    std::int64_t num_layers, num_kv_heads, block_size, head_dim;
    const std::int64_t *write_blocks, *write_offsets;               // by token
    const std::int64_t *tables, *lengths, *starts, *num_queries;  // by sequence
    std::int64_t table_stride, num_sequences, num_single, num_tokens;
    const Bf16 *cosines, *sines;
    Bf16 *narrow, *wide, *heads;  // [tokens, hidden or query rows], [.., qkv or gate and up], [..]
    float scale;
    int num_threads;
};

// Some rows of it, from one on: those of whole panels lie behind each other.
Matrix rows_from(const Matrix& matrix, std::int64_t first) {
    const auto* packed = static_cast<const Bf16*>(matrix.packed) + first * matrix.num_columns;
    const Bf16* bias = matrix.bias == nullptr ? nullptr : matrix.bias + first;
    return {packed, bias, matrix.bits, matrix.num_rows - first, matrix.num_columns, matrix.group};
}

void multiply(const Matrix& matrix, const Bf16* states, Bf16* answer, const Pass& pass) {
    if (matrix.bits == 16)
        return baton_linear(states, matrix.packed, matrix.bias, answer, pass.num_tokens,
                            matrix.num_rows, matrix.num_columns, pass.num_threads);
    baton_quantized_linear(states, static_cast<const std::uint8_t*>(matrix.packed), matrix.bias,
                           answer, pass.num_tokens, matrix.bits, matrix.num_rows,
                           matrix.num_columns, matrix.group, pass.num_threads);
}

void norm(const Bf16* states, const Bf16* weight, Bf16* target, const Layer& layer,
          const Pass& pass) {
    baton_norm(states, weight, target, pass.num_tokens, layer.qkv.num_columns, layer.epsilon,
               pass.num_threads);
}

void attend(const Layer& layer, const Pass& pass, const Bf16* queries, Bf16* answers) {
    const std::int64_t num_shared = layer.num_heads / pass.num_kv_heads;
    if (pass.num_single)
        baton_attend_singles(pass.blocks, pass.num_layers, pass.num_kv_heads, pass.block_size,
                             pass.head_dim, layer.index, queries, answers, pass.tables,
                             pass.table_stride, pass.lengths, layer.window, pass.num_single,
                             num_shared, pass.scale, pass.num_threads);
    for (std::int64_t which = pass.num_single; which < pass.num_sequences; ++which) {
        const std::int64_t first = pass.starts[which] * layer.num_heads * pass.head_dim;
        baton_attend_chunk(pass.blocks, pass.num_layers, pass.num_kv_heads, pass.block_size,
                           pass.head_dim, layer.index, queries + first, answers + first,
                           pass.tables + which * pass.table_stride, pass.num_queries[which],
                           pass.lengths[which], layer.window, num_shared, pass.scale,
                           pass.num_threads);
    }
}

void rotate(const Layer& layer, const Pass& pass, const Bf16* mixed, std::int64_t stride,
            const Bf16* weight, std::int64_t num_heads, Bf16* turned) {
    baton_rotate(mixed, stride, weight, pass.cosines, pass.sines, turned, pass.num_tokens,
                 num_heads, pass.head_dim, layer.epsilon, pass.num_threads);
}

// A token's values lie behind its keys.
void write(const Layer& layer, const Pass& pass, const Bf16* keys, std::int64_t stride) {
    const std::int64_t count = pass.num_kv_heads * pass.head_dim;
    rotate(layer, pass, keys, stride, layer.k_norm, pass.num_kv_heads, pass.heads);
    baton_write_kv(pass.blocks, pass.num_layers, pass.num_kv_heads, pass.block_size, pass.head_dim,
                   layer.index, pass.heads, count, keys + count, stride, pass.write_blocks,
                   pass.write_offsets, pass.num_tokens, pass.num_threads);
}

}  // namespace

extern "C" {

// states: [tokens, hidden], which become those after the layer.
void baton_layer(const Layer* layer, const Pass* pass, Bf16* states) {
    const std::int64_t count = pass->num_tokens * layer->qkv.num_columns;
    const std::int64_t stride = layer->qkv.num_rows, query_rows = layer->num_heads * pass->head_dim;
    norm(states, layer->input_norm, pass->narrow, *layer, *pass);
    multiply(layer->qkv, pass->narrow, pass->wide, *pass);
    write(*layer, *pass, pass->wide + query_rows, stride);
    rotate(*layer, *pass, pass->wide, stride, layer->q_norm, layer->num_heads, pass->heads);
    attend(*layer, *pass, pass->heads, pass->narrow);
    multiply(layer->output, pass->narrow, pass->wide, *pass);
    baton_add(states, pass->wide, count, pass->num_threads);

    norm(states, layer->post_norm, pass->narrow, *layer, *pass);
    multiply(layer->gate_up, pass->narrow, pass->wide, *pass);
    baton_gate(pass->wide, pass->heads, pass->num_tokens, layer->down.num_columns,
               pass->num_threads);
    multiply(layer->down, pass->heads, pass->narrow, *pass);
    baton_add(states, pass->narrow, count, pass->num_threads);
}

// Only what later tokens need of the layer: the keys and values.
void baton_layer_write(const Layer* layer, const Pass* pass, const Bf16* states) {
    const std::int64_t query_rows = layer->num_heads * pass->head_dim;
    const bool is_apart = layer->qkv.bits == 16 && query_rows % kPanelRows == 0;
    const Matrix mixing = is_apart ? rows_from(layer->qkv, query_rows) : layer->qkv;
    norm(states, layer->input_norm, pass->narrow, *layer, *pass);
    multiply(mixing, pass->narrow, pass->wide, *pass);
    write(*layer, *pass, pass->wide + (is_apart ? 0 : query_rows), mixing.num_rows);
}

}  // extern "C"
