// A decoder layer in one call. With few tokens, Python's overhead between the operations of a layer
// would be as long as some of them, and the pool's threads would go to sleep in between.

#include "abi.h"
#include "panels.h"

using namespace baton;

namespace {

// The rows of a matrix from `first` on, which must be the first row of a panel.
PackedMatrix rows_from(const PackedMatrix& matrix, std::int64_t first) {
    PackedMatrix rows = matrix;
    rows.packed = static_cast<Bf16*>(matrix.packed) + first * matrix.num_columns;
    rows.bias = matrix.bias == nullptr ? nullptr : matrix.bias + first;
    rows.num_rows -= first;
    return rows;
}

void linear(const PackedMatrix& matrix, const Bf16* src, Bf16* dst, const PassArgs& pass) {
    const LinearArgs args{
        .matrix = matrix,
        .src = src,
        .dst = dst,
        .num_tokens = pass.batch.num_tokens,
        .num_threads = pass.num_threads,
    };
    baton_linear(&args);
}

void rms_norm(const Bf16* src, const Bf16* weight, Bf16* dst, const LayerArgs& layer,
              const PassArgs& pass) {
    const RmsNormArgs args{
        .src = src,
        .weight = weight,
        .dst = dst,
        .num_rows = pass.batch.num_tokens,
        .size = layer.qkv.num_columns,
        .epsilon = layer.epsilon,
        .num_threads = pass.num_threads,
    };
    baton_rms_norm(&args);
}

void rope(const Bf16* src, std::int64_t src_stride, const Bf16* norm_weight, std::int64_t num_heads,
          Bf16* dst, const LayerArgs& layer, const PassArgs& pass) {
    const RopeArgs args{
        .src = src,
        .norm_weight = norm_weight,
        .cosines = pass.cosines,
        .sines = pass.sines,
        .dst = dst,
        .src_stride = src_stride,
        .num_tokens = pass.batch.num_tokens,
        .num_heads = num_heads,
        .head_dim = pass.kv.head_dim,
        .epsilon = layer.epsilon,
        .num_threads = pass.num_threads,
    };
    baton_rope(&args);
}

void attention(const Bf16* queries, Bf16* dst, const LayerArgs& layer, const PassArgs& pass) {
    const AttentionArgs args{
        .kv = pass.kv,
        .batch = pass.batch,
        .queries = queries,
        .dst = dst,
        .layer = layer.index,
        .num_heads = layer.num_heads,
        .window = layer.window,
        .scale = layer.scale,
        .num_threads = pass.num_threads,
    };
    baton_attention(&args);
}

// Rotates the keys and writes keys and values to the cache. A token's values follow its keys.
void write_kv(const Bf16* keys, std::int64_t stride, const LayerArgs& layer, const PassArgs& pass) {
    const std::int64_t count = pass.kv.num_kv_heads * pass.kv.head_dim;
    rope(keys, stride, layer.k_norm, pass.kv.num_kv_heads, pass.heads_buf, layer, pass);
    const WriteKvArgs args{
        .kv = pass.kv,
        .batch = pass.batch,
        .keys = pass.heads_buf,
        .values = keys + count,
        .layer = layer.index,
        .key_stride = count,
        .value_stride = stride,
        .num_threads = pass.num_threads,
    };
    baton_write_kv(&args);
}

}  // namespace

extern "C" {

void baton_layer(const LayerArgs* layer, const PassArgs* pass, Bf16* hidden) {
    const std::int64_t num_tokens = pass->batch.num_tokens;
    const std::int64_t count = num_tokens * layer->qkv.num_columns;
    const std::int64_t stride = layer->qkv.num_rows;
    const std::int64_t query_rows = layer->num_heads * pass->kv.head_dim;
    Bf16 *const narrow_buf = pass->narrow_buf, *const wide_buf = pass->wide_buf;
    Bf16* const heads_buf = pass->heads_buf;

    rms_norm(hidden, layer->input_norm, narrow_buf, *layer, *pass);
    linear(layer->qkv, narrow_buf, wide_buf, *pass);
    write_kv(wide_buf + query_rows, stride, *layer, *pass);
    rope(wide_buf, stride, layer->q_norm, layer->num_heads, heads_buf, *layer, *pass);
    attention(heads_buf, narrow_buf, *layer, *pass);
    linear(layer->output, narrow_buf, wide_buf, *pass);
    baton_add(hidden, wide_buf, count, pass->num_threads);

    rms_norm(hidden, layer->post_norm, narrow_buf, *layer, *pass);
    linear(layer->gate_up, narrow_buf, wide_buf, *pass);
    baton_swiglu(wide_buf, heads_buf, num_tokens, layer->down.num_columns, pass->num_threads);
    linear(layer->down, heads_buf, narrow_buf, *pass);
    baton_add(hidden, narrow_buf, count, pass->num_threads);
}

void baton_layer_write_kv(const LayerArgs* layer, const PassArgs* pass, const Bf16* hidden) {
    const std::int64_t query_rows = layer->num_heads * pass->kv.head_dim;
    const bool skips_queries = layer->qkv.bits == 16 && query_rows % kPanelRows == 0;
    const PackedMatrix matrix = skips_queries ? rows_from(layer->qkv, query_rows) : layer->qkv;
    rms_norm(hidden, layer->input_norm, pass->narrow_buf, *layer, *pass);
    linear(matrix, pass->narrow_buf, pass->wide_buf, *pass);
    write_kv(pass->wide_buf + (skips_queries ? 0 : query_rows), matrix.num_rows, *layer, *pass);
}

}  // extern "C"
