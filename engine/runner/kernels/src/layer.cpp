// Decoder layers in one call. With few tokens, Python's overhead between the operations of a layer
// would be as long as some of them, and the pool's threads would go to sleep in between.

#include <algorithm>

#include "abi.h"
#include "gate.h"
#include "panels.h"
#include "thread_pool.h"

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

// The input of queries, keys and values can be wider.
std::int64_t hidden_size(const LayerArgs& layer) { return layer.output.num_rows; }

// Linear layers of a layer, in the order of an adapter's places.
enum Place { kQkv, kOutput, kGateUp, kDown };

// Adds the products of adapters to the outputs of a linear layer.
void add_low_rank(const PackedMatrix& matrix, Place place, const Bf16* src, Bf16* dst,
                  const LayerArgs& layer, const PassArgs& pass) {
    if (pass.groups.num_groups == 0) return;
    const LowRankArgs args{
        .groups = pass.groups,
        .src = src,
        .dst = dst,
        .hidden_buf = pass.hidden_buf,
        .place = layer.first_place + place,
        .num_columns = matrix.num_columns,
        .num_rows = matrix.num_rows,
        .num_threads = pass.num_threads,
    };
    baton_add_low_rank(&args);
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

// A matrix that adapters can change. `next`: the matrix that is read next, or null.
void linear(const PackedMatrix& matrix, Place place, const Bf16* src, Bf16* dst,
            const LayerArgs& layer, const PassArgs& pass, const PackedMatrix* next) {
    linear(matrix, src, dst, pass);
    if (next != nullptr) expect_reads(next->packed, baton_packed_bytes(next));
    add_low_rank(matrix, place, src, dst, layer, pass);
}

// Applies a norm to rows. Returns dst, or src if there is no norm.
const Bf16* rms_norm(const Bf16* src, std::int64_t src_stride, const NormParams& norm, Bf16* dst,
                     std::int64_t size, const PassArgs& pass) {
    if (norm.weight == nullptr) return src;
    const RmsNormArgs args{
        .src = src,
        .norm = norm,
        .dst = dst,
        .num_rows = pass.batch.num_tokens,
        .size = size,
        .src_stride = src_stride,
        .dst_stride = size,
        .num_threads = pass.num_threads,
    };
    baton_rms_norm(&args);
    return dst;
}

// Applies a norm to hidden states.
const Bf16* rms_norm(const Bf16* src, const NormParams& norm, Bf16* dst, const LayerArgs& layer,
                     const PassArgs& pass) {
    const std::int64_t size = hidden_size(layer);
    return rms_norm(src, size, norm, dst, size, pass);
}

// Norms each head in place.
void norm_heads(Bf16* heads, std::int64_t stride, std::int64_t num_heads, const NormParams& norm,
                const PassArgs& pass) {
    if (norm.weight == nullptr) return;
    const std::int64_t size = pass.kv.head_dim;
    for (std::int64_t head = 0; head < num_heads; ++head) {
        const RmsNormArgs args{
            .src = heads + head * size,
            .norm = norm,
            .dst = heads + head * size,
            .num_rows = pass.batch.num_tokens,
            .size = size,
            .src_stride = stride,
            .dst_stride = stride,
            .num_threads = pass.num_threads,
        };
        baton_rms_norm(&args);
    }
}

// Norms heads that are neighbours, in place.
void norm_joined(Bf16* heads, std::int64_t num_heads, const NormParams& norm,
                 const PassArgs& pass) {
    const std::int64_t size = pass.kv.head_dim;
    const RmsNormArgs args{
        .src = heads,
        .norm = norm,
        .dst = heads,
        .num_rows = pass.batch.num_tokens * num_heads,
        .size = size,
        .src_stride = size,
        .dst_stride = size,
        .num_threads = pass.num_threads,
    };
    baton_rms_norm(&args);
}

// Norms and rotates heads into heads_buf, or rotates and norms them. Can overwrite narrow_buf.
void rope(const Bf16* heads, std::int64_t stride, std::int64_t num_heads, NormParams norm,
          std::int64_t rope_index, const LayerArgs& layer, const PassArgs& pass) {
    const std::int64_t size = num_heads * pass.kv.head_dim;
    if (layer.norms_all_heads && norm.weight != nullptr) {
        heads = rms_norm(heads, stride, norm, pass.narrow_buf, size, pass);
        stride = size, norm = {};
    }
    const RopeArgs args{
        .src = heads,
        .norm = layer.norms_rotated ? NormParams{} : norm,
        .angles = pass.angles[rope_index],
        .dst = pass.heads_buf,
        .src_stride = stride,
        .num_tokens = pass.batch.num_tokens,
        .num_heads = num_heads,
        .head_dim = pass.kv.head_dim,
        .num_threads = pass.num_threads,
    };
    baton_rope(&args);
    if (layer.norms_rotated) norm_joined(pass.heads_buf, num_heads, norm, pass);
}

void attention(const Bf16* queries, Bf16* dst, const LayerArgs& layer, const PassArgs& pass) {
    const AttentionArgs args{
        .kv = pass.kv,
        .batch = pass.batch,
        .params = pass.attention[layer.index],
        .queries = queries,
        .dst = dst,
        .layer = layer.index,
        .num_heads = layer.num_heads,
        .num_threads = pass.num_threads,
    };
    baton_attention(&args);
}

void gate(const Bf16* gate_up, Bf16* dst, const LayerArgs& layer, const PassArgs& pass) {
    const GateArgs args{
        .src = gate_up,
        .dst = dst,
        .num_tokens = pass.batch.num_tokens,
        .size = layer.down.num_columns,
        .gate = layer.gate,
        .num_threads = pass.num_threads,
    };
    baton_gate(&args);
}

// hidden += the norm of the output, which is overwritten. Of several ranks, the outputs are added
// up.
void add_output(Bf16* output, const NormParams& norm, Bf16* hidden, const LayerArgs& layer,
                const PassArgs& pass) {
    const std::int64_t count = pass.batch.num_tokens * hidden_size(layer);
    if (pass.ranks != nullptr) baton_all_reduce(pass.ranks, output, count, 0, pass.num_threads);
    rms_norm(output, norm, output, layer, pass);
    baton_add(hidden, output, count, layer.residual_scale, pass.num_threads);
}

// Rotates the keys and writes keys and values to the cache. A token's values follow its keys, or
// are the keys themselves. Overwrites values that are normed.
void write_kv(Bf16* keys, std::int64_t stride, const LayerArgs& layer, const PassArgs& pass) {
    const std::int64_t count = pass.kv.num_kv_heads * pass.kv.head_dim;
    Bf16* const values = layer.values_are_keys ? keys : keys + count;
    rope(keys, stride, pass.kv.num_kv_heads, layer.k_norm, layer.key_rope, layer, pass);
    norm_heads(values, stride, pass.kv.num_kv_heads, layer.v_norm, pass);
    const WriteKvArgs args{
        .kv = pass.kv,
        .batch = pass.batch,
        .keys = pass.heads_buf,
        .values = values,
        .layer = layer.index,
        .key_stride = count,
        .value_stride = stride,
        .num_threads = pass.num_threads,
    };
    baton_write_kv(&args);
}

// `inputs`: those of queries, keys and values, or null: normed hidden states.
void compute_attention(const LayerArgs& layer, const PassArgs& pass, Bf16* hidden,
                       const Bf16* inputs) {
    const PackedMatrix* const next = layer.gate_up.packed == nullptr ? nullptr : &layer.gate_up;
    const std::int64_t stride = layer.qkv.num_rows;
    const std::int64_t query_rows = layer.num_heads * pass.kv.head_dim;
    if (inputs == nullptr)
        inputs = rms_norm(hidden, layer.input_norm, pass.narrow_buf, layer, pass);
    linear(layer.qkv, kQkv, inputs, pass.wide_buf, layer, pass, &layer.output);
    if (layer.writes_kv) write_kv(pass.wide_buf + query_rows, stride, layer, pass);
    rope(pass.wide_buf, stride, layer.num_heads, layer.q_norm, layer.query_rope, layer, pass);
    attention(pass.heads_buf, pass.narrow_buf, layer, pass);
    linear(layer.output, kOutput, pass.narrow_buf, pass.wide_buf, layer, pass, next);
    add_output(pass.wide_buf, layer.attention_norm, hidden, layer, pass);
}

// Adds the layer's own input, gated by the hidden states.
void add_own_input(const LayerArgs& layer, const PassArgs& pass, Bf16* hidden) {
    const std::int64_t size = layer.own_input_gate.num_rows;
    linear(layer.own_input_gate, hidden, pass.wide_buf, pass);
    const Bf16* const own = pass.own_inputs + layer.own_input * size;
    const auto gate_tokens = [&](std::int64_t token, std::int64_t end) {
        for (; token < end; ++token)
            gate_row(pass.wide_buf + token * size, own + token * pass.own_inputs_stride,
                     pass.heads_buf + token * size, size, layer.gate);
    };
    parallel_for(pass.batch.num_tokens, size, pass.num_threads, gate_tokens);
    linear(layer.own_input_projection, pass.heads_buf, pass.narrow_buf, pass);
    rms_norm(pass.narrow_buf, layer.own_input_norm, pass.narrow_buf, layer, pass);
    baton_add(hidden, pass.narrow_buf, pass.batch.num_tokens * hidden_size(layer), 1.0f,
              pass.num_threads);
}

void scale_output(const LayerArgs& layer, const PassArgs& pass, Bf16* hidden) {
    const std::int64_t count = pass.batch.num_tokens * hidden_size(layer);
    const auto scale = [&](std::int64_t at, std::int64_t end) {
        for (; at < end; ++at)
            hidden[at] = f32_to_bf16(bf16_to_f32(hidden[at]) * layer.output_scale);
    };
    parallel_for(count, 1, pass.num_threads, scale);
}

void copy_states(const Bf16* hidden, const LayerArgs& layer, const PassArgs& pass,
                 const TapArgs& tap) {
    if (tap.dst == nullptr) return;
    const std::int64_t size = hidden_size(layer);
    for (std::int64_t token = 0; token < pass.batch.num_tokens; ++token)
        std::copy_n(hidden + token * size, size, tap.dst + token * tap.stride);
}

void compute_layer(const LayerArgs& layer, const PassArgs& pass, Bf16* hidden, const Bf16* inputs,
                   const PackedMatrix* next) {
    compute_attention(layer, pass, hidden, inputs);
    linear(layer.gate_up, kGateUp, rms_norm(hidden, layer.mlp_norm, pass.narrow_buf, layer, pass),
           pass.wide_buf, layer, pass, &layer.down);
    gate(pass.wide_buf, pass.heads_buf, layer, pass);
    linear(layer.down, kDown, pass.heads_buf, pass.narrow_buf, layer, pass, next);
    add_output(pass.narrow_buf, layer.mlp_output_norm, hidden, layer, pass);
    if (layer.own_input_gate.packed != nullptr) add_own_input(layer, pass, hidden);
    if (layer.output_scale != 1.0f) scale_output(layer, pass, hidden);
}

}  // namespace

extern "C" {

void baton_layers(const LayerArgs* layers, std::int64_t num_layers, const PassArgs* passes,
                  Bf16* hidden, const Bf16* inputs, const TapArgs* taps) {
    for (std::int64_t i = 0; i < num_layers; ++i) {
        const PassArgs& pass = passes[layers[i].kv_group];
        const PackedMatrix* const next = i + 1 < num_layers ? &layers[i + 1].qkv : nullptr;
        if (taps != nullptr) copy_states(hidden, layers[i], pass, taps[i]);
        compute_layer(layers[i], pass, hidden, inputs, next);
        inputs = nullptr;
    }
}

void baton_layer_attention(const LayerArgs* layer, const PassArgs* passes, Bf16* hidden,
                           Bf16* mlp_input) {
    const PassArgs& pass = passes[layer->kv_group];
    compute_attention(*layer, pass, hidden, nullptr);
    rms_norm(hidden, layer->mlp_norm, mlp_input, *layer, pass);
}

void baton_layer_write_kv(const LayerArgs* layer, const PassArgs* passes, const Bf16* hidden) {
    const PassArgs& pass = passes[layer->kv_group];
    const std::int64_t query_rows = layer->num_heads * pass.kv.head_dim;
    // Rows of adapters are those of the whole matrix.
    const bool skips_queries =
        layer->qkv.bits == 16 && query_rows % kPanelRows == 0 && pass.groups.num_groups == 0;
    const PackedMatrix matrix = skips_queries ? rows_from(layer->qkv, query_rows) : layer->qkv;
    linear(matrix, kQkv, rms_norm(hidden, layer->input_norm, pass.narrow_buf, *layer, pass),
           pass.wide_buf, *layer, pass, nullptr);
    write_kv(pass.wide_buf + (skips_queries ? 0 : query_rows), matrix.num_rows, *layer, pass);
}

}  // extern "C"
