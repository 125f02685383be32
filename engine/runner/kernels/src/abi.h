// Exported functions of the library and their argument structs.
//
// `abi.py` reads this file. It knows structs of numbers, enums, other structs and pointers, inline
// methods, and functions of these.
//
// Fields are ordered by size, so that the only padding is at the end of a struct.
#pragma once

#include <cstdint>

namespace baton {

using Bf16 = std::uint16_t;  // bit pattern

// Paged KV cache. A block has places, and a layer has [tensors, kv_heads, block_size, head_dim]
// from its place on. The tensors are keys and values, or keys alone: then the leading value_dim
// numbers of a key are its value. Layers of other KV groups can have other heads.
//
// Numbers are bf16, or have a byte each, and then head_dim is even: int8, followed by the bf16
// scale of the slot, or FP8 (e4m3), which has scales by layer.
struct PagedKv {
    Bf16* blocks;
    const float* scales;  // of FP8, [places, tensors, kv_heads]; null for others
    // In units of two bytes. Between keys and values: that of all heads of the model, of which the
    // heads here can be a part.
    std::int64_t block_stride, place_stride, tensor_stride;
    std::int64_t num_tensors, num_kv_heads, block_size, head_dim;
    std::int64_t value_dim;  // head_dim if there are values
    std::int64_t is_int8;

    bool has_bytes() const { return is_int8 || scales != nullptr; }

    // Distance between slots, in units of two bytes.
    std::int64_t slot_size() const { return has_bytes() ? head_dim / 2 + is_int8 : head_dim; }

    // Scale of FP8.
    float scale(std::int64_t place, int key_or_value, std::int64_t head) const {
        const int tensor = num_tensors == 1 ? 0 : key_or_value;
        return scales[(place * num_tensors + tensor) * num_kv_heads + head];
    }

    // Slots of a head in one block: keys (key_or_value = 0) or values (1).
    Bf16* slots(std::int64_t block, std::int64_t place, int key_or_value, std::int64_t head) const {
        const int tensor = num_tensors == 1 ? 0 : key_or_value;
        Bf16* const layer = blocks + block * block_stride + place * place_stride;
        return layer + tensor * tensor_stride + head * block_size * slot_size();
    }
};

// Flat batch of tokens, sequence after sequence. The first num_single sequences have one token.
struct BatchLayout {
    // By token.
    const std::int64_t *write_blocks, *write_offsets;
    // By token: the end of the slots that it attends to. Null: its own is the last one. No token's
    // is before that of an earlier token of its sequence.
    const std::int64_t* seen_ends;
    // By sequence.
    const std::int64_t *block_tables, *context_lens, *query_starts, *num_queries;
    std::int64_t table_stride, num_sequences, num_single, num_tokens;
};

// Type of scales, and of offsets. kSteps: signed bytes, times float16 steps for 256 columns each.
enum class ScaleType : std::int64_t { kFloat32, kBfloat16, kFloat16, kSteps };

// Weight matrix in packed layout, with the bias of its rows.
struct PackedMatrix {
    void* packed;
    const Bf16* bias;   // or null
    std::int64_t bits;  // 16 for bf16, 13 for bf16 as integers (AVX2); 8, 6 or 4 if quantized
    std::int64_t num_rows, num_columns;
    std::int64_t group_size;   // columns with a common scale, if quantized
    std::int64_t is_mxfp4;     // 1: numbers are FP4 codes, scales are powers of two, no zero points
    ScaleType scale_type;      // if quantized; float32 if is_mxfp4, or if group_size > 256
    std::int32_t has_offsets;  // 1: numbers * scales + offsets, without zero points
    std::int32_t is_centred;   // 1: all zero points are the middle of the numbers: 32 or 8
    // 8: activations are rounded to 8 bits. Weights have 4 bits in groups of whole blocks of 32, or
    // 6 bits in groups of 16 or whole blocks. Only these are centred, and have scales of kSteps:
    // with offsets in groups of 32, or in groups of 16.
    std::int64_t activation_bits;  // 16, 13 with weights of 13, or 8
};

struct PackArgs {
    PackedMatrix matrix;
    const void* weights;        // [rows, columns]: bf16, or one byte each if quantized
    const void* scales;         // [rows, groups] of the matrix's scale type, or null
    const std::uint8_t* zeros;  // [rows, groups], or null
    const void* offsets;        // [rows, groups] of scale_type, or null
    // Of scales and offsets: [rows, steps], float16, or null
    const std::uint16_t *scale_steps, *offset_steps;
    std::int32_t num_threads;
};

struct LinearArgs {
    PackedMatrix matrix;
    const Bf16* src;  // [tokens, columns]
    Bf16* dst;        // [tokens, rows]
    std::int64_t num_tokens;
    std::int32_t num_threads;
};

// A matrix for each head. All have the same shape.
struct HeadLinearArgs {
    const PackedMatrix* matrices;
    const Bf16* src;  // [heads, tokens, columns]
    Bf16* dst;        // [heads, tokens, rows]
    std::int64_t num_heads, num_tokens;
    std::int32_t num_threads;
};

// Low-rank change of neighbouring rows of a matrix.
struct LowRankPart {
    const Bf16* down;  // [rank, columns]
    const Bf16* up;    // [rank, rows]
    std::int64_t rank, first_row, num_rows;
};

// Parts of an adapter at a linear layer.
struct LowRankPlace {
    const LowRankPart* parts;
    std::int64_t num_parts;
};

// Places of an adapter: of the linear layers of a model, or of the experts or heads of one of them.
struct LowRankAdapter {
    const LowRankPlace* places;
    std::int64_t num_places;  // the adapter has nothing for others
};

// Groups of tokens with the same adapter.
struct LowRankGroups {
    const LowRankAdapter* adapters;    // [groups]
    const std::int64_t* first_tokens;  // [groups + 1]
    const std::int64_t* tokens;        // of all groups
    std::int64_t num_groups;
};

struct LowRankArgs {
    LowRankGroups groups;
    const Bf16* src;    // [tokens, columns]
    Bf16* dst;          // [tokens, rows]
    float* hidden_buf;  // for each part, [tokens of its group, rank]
    std::int64_t place, num_columns, num_rows;
    std::int32_t num_threads;
};

// As LowRankArgs, for a matrix of each head. An adapter's places are those of the heads.
struct HeadLowRankArgs {
    LowRankGroups groups;
    const Bf16* src;    // [heads, tokens, columns]
    Bf16* dst;          // [heads, tokens, rows]
    float* hidden_buf;  // for each part of a head, [tokens of its group, rank]
    std::int64_t num_heads, num_tokens, num_columns, num_rows;
    std::int32_t num_threads;
};

// Matrix of float32, packed for baton_linear_f32.
struct PackF32Args {
    const float* weights;  // [rows, columns]
    float* packed;
    std::int64_t num_rows, num_columns;
    std::int32_t num_threads;
};

// Packed matrix of float32, with its bias.
struct PackedF32 {
    const float *packed, *bias;  // the bias may be null
    std::int64_t num_rows, num_columns;
};

struct LinearF32Args {
    const float* src;  // [tokens, columns]
    float* dst;        // [tokens, rows]
    PackedF32 matrix;
    std::int64_t num_tokens;
    std::int32_t num_threads;
};

struct GeluF32Args {
    const float* src;
    float* dst;
    std::int64_t count;
    std::int32_t is_exact;  // 0: by tanh
    std::int32_t num_threads;
};

// Texts one after the other, of which each token attends to its whole text.
struct TextAttentionArgs {
    const float* qkv;                  // [tokens, 3 * size]
    float* dst;                        // [tokens, size]
    const std::int64_t* first_tokens;  // [texts + 1]
    std::int64_t num_texts, num_heads, head_dim, size;
    float scale;
    std::int32_t num_threads;
};

struct LayerNormF32 {
    const float *weight, *bias;  // the bias may be null
    float epsilon;
};

// Layer of an encoder that norms the sums after attention and after the MLP, as BERT does.
struct EncoderLayerArgs {
    float* hidden_states;  // [tokens, size], replaced by the output
    float* qkv_states;     // buffer: [tokens, 3 * size]
    float* mixed;          // buffer: [tokens, size]
    float* mlp_states;     // buffer: [tokens, MLP size]
    PackedF32 qkv, output, up, down;
    LayerNormF32 attention_norm, mlp_norm;
    const std::int64_t* first_tokens;  // [texts + 1]
    std::int64_t num_texts, num_heads, size;
    std::int32_t gelu_is_exact;  // 0: by tanh
    std::int32_t num_threads;
};

struct RankLinks;

// RMS norm. A bf16 weight multiplies rounded numbers; with a float32 weight only the product is
// rounded.
struct NormParams {
    const void* weight;  // null for no norm
    float epsilon;
    std::int32_t is_float32;
    RankLinks* ranks;  // that have as many numbers of each row; null: these are all
};

struct RmsNormArgs {
    const Bf16* src;  // [rows, size], with a stride between rows
    NormParams norm;
    Bf16* dst;  // likewise; can be src if the strides are equal
    std::int64_t num_rows, size, src_stride, dst_stride;
    std::int32_t num_threads;
};

// Layer norm. Only the result is rounded.
struct LayerNormArgs {
    const Bf16* src;  // [rows, size]
    LayerNormF32 norm;
    Bf16* dst;                    // [rows, size]; can be src
    std::int64_t num_rows, size;  // whole vectors: a multiple of 16
    std::int32_t num_threads;
};

struct GeluArgs {
    const Bf16* src;
    Bf16* dst;              // can be src
    std::int64_t count;     // a multiple of 16
    std::int32_t is_exact;  // 0: by tanh
    std::int32_t num_threads;
};

struct RopeAngles {
    const Bf16 *cosines, *sines;  // [tokens, head_dim]
};

struct RopeArgs {
    const Bf16* src;  // [tokens, heads, head_dim], with a stride between tokens
    NormParams norm;  // of each head before the rotation
    RopeAngles angles;
    Bf16* dst;  // [tokens, heads, head_dim]
    std::int64_t src_stride, num_tokens, num_heads, head_dim;
    std::int32_t num_threads;
};

enum class GateKind : std::int32_t { kSilu, kGeluTanh, kClampedSwiglu, kSquaredRelu };

// Function of the gate and up projections of an MLP; see gate.h. kSquaredRelu is one of up alone.
struct GateParams {
    GateKind kind;
    float alpha, limit;  // of kClampedSwiglu
};

struct GateArgs {
    const Bf16* src;  // [tokens, 2 * size], gate first; [tokens, size] without gates
    Bf16* dst;        // [tokens, size]
    std::int64_t num_tokens, size;
    GateParams gate;
    std::int32_t num_threads;
};

struct ArgmaxArgs {
    const float* logits;  // [rows, size]
    std::int64_t* indices;
    bool* are_finite;
    std::int64_t num_rows, size;
    std::int32_t num_threads;
};

// Draws of some rows. Arrays are by draw unless noted.
struct DrawArgs {
    const float* logits;       // [rows, size]
    std::int64_t* token_ids;   // by row: a likeliest token, which the draw replaces
    const std::int64_t* rows;  // which are drawn
    const std::int64_t* keys;  // of random numbers
    const float *temperatures, *min_p, *top_p;
    const std::int64_t* top_k;    // 0: all
    std::int64_t num_rows, size;  // num_rows: of draws
    std::int32_t num_threads;
};

// Bit masks of the tokens that rows allow. Arrays are by mask unless noted.
struct MaskArgs {
    float* scores;              // [rows, size]
    const std::uint32_t* bits;  // [masks, words]: 32 tokens a word, the lowest bit first
    const std::int64_t* rows;   // which are masked
    std::int64_t num_masks, num_words, size;
    std::int32_t num_threads;
};

// Logprobs of chosen and top tokens. Arrays are by measured row unless noted.
struct LogprobArgs {
    const float* logits;            // [rows, size]
    const std::int64_t* rows;       // which are measured
    const std::int64_t* token_ids;  // chosen
    float *chosen, *top;            // logprobs; those of top tokens: [measured, tops]
    std::int64_t *ranks, *top_ids;  // of chosen tokens; [measured, tops], the likeliest first
    std::int64_t num_rows, size, num_tops;  // num_rows: measured
    std::int32_t num_threads;
};

struct WriteKvArgs {
    PagedKv kv;
    BatchLayout batch;
    // [tokens, kv_heads, head_dim], with strides between tokens. A cache of keys alone ignores
    // values.
    const Bf16 *keys, *values;
    std::int64_t layer, key_stride, value_stride;
    std::int32_t num_threads;
};

// Attention of one layer.
struct AttentionParams {
    const float* sinks;          // [heads]: logits of a slot without a value; or null
    std::int64_t window, chunk;  // slots that a token attends to: see baton_attention. 0 for none
    float scale;                 // of the scores
    float softcap;               // scores become softcap * tanh(score / softcap); 0 for none
    std::int64_t is_causal;      // a token attends up to itself, whatever `seen_ends` has
};

struct AttentionArgs {
    PagedKv kv;
    BatchLayout batch;
    AttentionParams params;
    const Bf16* queries;  // [tokens, heads, head_dim]
    Bf16* dst;            // [tokens, heads, value_dim]
    std::int64_t layer, num_heads;
    std::int32_t num_threads;
};

// A decoder layer. The same in each pass.
struct LayerArgs {
    NormParams input_norm, q_norm, k_norm, v_norm, attention_norm, mlp_norm, mlp_output_norm;
    NormParams own_input_norm;  // for the product of the layer's own input
    PackedMatrix qkv, output;   // qkv has no values if they are keys, and queries alone of a reader
    // Unused by `baton_layer_attention`. Gate and projection of the layer's own input can be null.
    PackedMatrix gate_up, down, own_input_gate, own_input_projection;
    std::int64_t index, num_heads;
    std::int64_t kv_group;              // whose PassArgs are used
    std::int64_t query_rope, key_rope;  // indices into PassArgs::angles
    std::int64_t first_place;           // in adapters: qkv, then output, gate_up and down
    std::int64_t own_input;             // in PassArgs::own_inputs
    GateParams gate;
    float residual_scale;          // of the outputs of attention and MLP
    float output_scale;            // of the hidden states
    std::int32_t norms_all_heads;  // q_norm and k_norm: all heads of a token at once
    std::int32_t norms_rotated;    // q_norm and k_norm: after RoPE
    std::int32_t writes_kv;        // 0: it reads the keys and values of another layer
    std::int32_t values_are_keys;  // before norm and RoPE
};

// Where the hidden states that enter a layer are copied to; null: nowhere.
struct TapArgs {
    Bf16* dst;
    std::int64_t stride;  // between tokens
};

// Processes that compute a model together, as one of them sees them. All make the same calls in the
// same order.
struct RankLinks {
    void* shared;  // memory of all of them; see baton_rank_bytes
    std::int64_t rank, size, buffer_bytes;
    std::int64_t patience_ms;  // that a call waits for another rank; negative: for ever
    std::int64_t calls;        // steps of calls so far
    std::int64_t spent_ns;     // in calls so far
    std::int64_t missing;      // 1 + the rank that did not come in time or has ended; 0: none
};

// A forward pass, with buffers for intermediate results. The same for each layer of a KV group.
struct PassArgs {
    PagedKv kv;
    BatchLayout batch;
    RankLinks* ranks;  // that add up their outputs of attention and MLP; null: one computes all
    const AttentionParams* attention;  // by layer
    const RopeAngles* angles;          // by RoPE
    const Bf16* own_inputs;            // [tokens, layers, size], or null
    std::int64_t own_inputs_stride;    // between tokens
    // Each [tokens, ..]: hidden size or query rows; qkv or gate and up; rotated heads or gated.
    Bf16 *narrow_buf, *wide_buf, *heads_buf;
    LowRankGroups groups;  // without any, num_groups is 0
    float* hidden_buf;     // as in LowRankArgs, for the place that needs most
    std::int32_t num_threads;
};

enum class Scoring : std::int32_t { kSoftmax, kSoftmaxOfTop, kSigmoid };

// Choice of experts. The fields mirror those of MoeConfig.
struct RouteArgs {
    const float* router;                  // [experts, hidden_size]
    const float *bias, *correction_bias;  // [experts], or null
    const Bf16* src;                      // [tokens, hidden_size]
    std::int64_t* expert_ids;             // [tokens, top_k], best first
    float* weights;                       // [tokens, top_k]
    std::int64_t num_tokens, hidden_size, num_experts, top_k, num_groups, top_groups;
    std::int64_t group_best;  // scores by whose sum a group counts
    float scale;
    Scoring scoring;
    std::int32_t normalizes, num_threads;
};

// Experts of a layer. All have the same shape and bits.
struct MixArgs {
    const PackedMatrix *gate_up, *down;  // by expert
    const Bf16* src;                     // [tokens, hidden_size]
    const std::int64_t* expert_ids;      // [tokens, top_k]
    const float* weights;                // [tokens, top_k]
    Bf16* dst;                           // [tokens, hidden_size]
    // Each [tokens * top_k, ..]: hidden size; gate and up; gated.
    Bf16 *narrow_buf, *wide_buf, *gated_buf;
    std::int64_t num_tokens, top_k;
    std::int64_t first_expert, num_experts;  // no others are computed
    GateParams gate;
    LowRankGroups groups;  // without any, num_groups is 0; an adapter's places are those of gate_up
    const LowRankAdapter* down_adapters;  // [groups]
    float* hidden_buf;  // for each part of an expert, [rows, rank], for the matrix that needs most
    std::int32_t scales_input, num_threads;
};

// States of recurrent layers: rows in blocks.
struct StateRows {
    char* blocks;
    std::int64_t block_bytes, row_bytes, rows_per_block;
};

// Runs of tokens, with the blocks of the state before and after each. The runs of a sequence follow
// each other: the next one continues from the state that the previous one wrote.
struct StateRuns {
    // By run. A run without tokens copies the state.
    const std::int64_t *first_tokens, *num_tokens_of;
    const std::int64_t *reads, *writes;  // [runs, blocks]; a negative read is a state of zeros
    const std::int64_t* first_runs;      // by sequence
    std::int64_t num_blocks, num_runs, num_sequences, num_tokens;
};

// Linear attention of one layer. The layer's rows of a state are the matrices of all value heads,
// then the last inputs of the convolution.
struct DeltaArgs {
    StateRows states;
    StateRuns runs;
    const Bf16* projected;  // [tokens, ..]: queries, keys, values and output gates
    const Bf16* gates;      // [tokens, ..]: write strengths, then decays, of the value heads
    const float* conv;      // [conv_size, channels], the oldest token first
    const float *decay_bias, *decay_rate;  // [decays], [value heads]
    NormParams norm;                       // of a head's output
    Bf16* dst;                             // [tokens, values]
    // Buffers: [sequences, conv_size - 1, channels]; [channels, tokens] and [value heads, tokens,
    // decays and a strength], by head; [tokens, values].
    Bf16* inputs_buf;
    float *mixed_buf, *gates_buf, *outputs_buf;
    std::int64_t first_row;  // of the layer
    std::int64_t num_key_heads, num_value_heads, key_dim, value_dim, conv_size;
    float strength_scale;
    // A head has a decay for each key channel, and sigmoids as output gates (Kimi).
    std::int32_t decays_channels;
    std::int32_t num_threads;
};

// A Mamba2 layer. The layer's rows of a state are those of DeltaArgs; the queries, keys and values
// are C, B and x.
struct MambaArgs {
    StateRows states;
    StateRuns runs;
    const Bf16* projected;                       // [tokens, ..]: as in DeltaArgs
    const Bf16* gates;                           // [tokens, value heads]: steps
    const float *conv, *conv_bias;               // [conv_size, channels]; [channels]
    const float *step_bias, *decay_rate, *skip;  // [value heads]
    NormParams norm;                             // of the output of the value heads of a key head
    Bf16* dst;                                   // [tokens, values]
    // Buffers: those of DeltaArgs.
    Bf16* inputs_buf;
    float *mixed_buf, *gates_buf, *outputs_buf;
    std::int64_t first_row;  // of the layer
    std::int64_t num_key_heads, num_value_heads, key_dim, value_dim, conv_size;
    std::int32_t num_threads;
};

// A short convolution over products of factors and values. The layer's rows of a state are the last
// products; there are no key heads.
struct ShortConvArgs {
    StateRows states;
    StateRuns runs;
    Bf16* projected;         // [tokens, ..]: factors, which become the products, and values
    const Bf16* gates;       // [tokens, values]
    const float* conv;       // [conv_size, values], the oldest token first
    Bf16* dst;               // [tokens, values]
    Bf16* inputs_buf;        // [sequences, conv_size - 1, values]
    float* mixed_buf;        // [tokens, values]
    std::int64_t first_row;  // of the layer
    std::int64_t num_key_heads, num_value_heads, key_dim, value_dim, conv_size;
    std::int32_t num_threads;
};

struct SigmoidArgs {
    Bf16* dst;          // [rows, size]
    const Bf16* gates;  // [rows, size], or one for each row; with a stride between rows
    std::int64_t num_rows, size, gate_stride;
    std::int32_t has_one_gate, num_threads;
};

constexpr std::int64_t kDigestBytes = 16;

// Blocks of more than 240 bytes.
struct CopyArgs {
    const std::uint64_t* src_addresses;  // [blocks]
    const std::uint64_t* dst_addresses;  // [blocks]
    std::uint8_t* digests;               // [blocks, kDigestBytes]
    std::int64_t num_blocks, block_bytes;
};

}  // namespace baton

extern "C" {

// Size of `matrix.packed` in bytes.
std::int64_t baton_packed_bytes(const baton::PackedMatrix* matrix);

// Packs weights. bf16 needs an even number of columns; a quantized group has a multiple of eight
// columns, or all columns. `matrix.packed` must be zeroed.
void baton_pack(const baton::PackArgs* args);

// Copies `count` rows of the matrix, dequantized, to dst, [count, columns].
void baton_get_rows(const baton::PackedMatrix* matrix, const std::int64_t* row_ids,
                    std::int64_t count, baton::Bf16* dst);

// dst = src * transposed matrix + bias.
void baton_linear(const baton::LinearArgs* args);

// dst = src * transposed matrix, head by head.
void baton_head_linear(const baton::HeadLinearArgs* args);

// RMS norm of each row.
void baton_rms_norm(const baton::RmsNormArgs* args);

// Layer norm of each row.
void baton_layer_norm(const baton::LayerNormArgs* args);

// GELU.
void baton_gelu(const baton::GeluArgs* args);

// Rotary position embedding, after the norm of each head.
void baton_rope(const baton::RopeArgs* args);

// Adds the products of adapters to the outputs of a linear layer.
void baton_add_low_rank(const baton::LowRankArgs* args);

// Adds the products of adapters to the outputs of heads.
void baton_add_head_low_rank(const baton::HeadLowRankArgs* args);

// Numbers of a packed float32 matrix, and its packing.
std::int64_t baton_packed_f32_size(std::int64_t num_rows, std::int64_t num_columns);
void baton_pack_f32(const baton::PackF32Args* args);

// Linear layer in float32.
void baton_linear_f32(const baton::LinearF32Args* args);

// GELU of float32 numbers.
void baton_gelu_f32(const baton::GeluF32Args* args);

// Attention within texts, in float32.
void baton_text_attention(const baton::TextAttentionArgs* args);

// Layer of an encoder, in float32.
void baton_encoder_layer(const baton::EncoderLayerArgs* args);

// Gate of an MLP.
void baton_gate(const baton::GateArgs* args);

// Index of the first maximum of each row (undefined with a NaN), and whether all its numbers are
// finite.
void baton_argmax(const baton::ArgmaxArgs* args);

// Sets the scores of tokens that are not allowed to -inf.
void baton_mask(const baton::MaskArgs* args);

// Draws tokens by their probabilities. Those of rows that are not finite are undefined.
void baton_draw(const baton::DrawArgs* args);

// Logprobs of chosen and top tokens, and one plus the number of tokens with a higher logprob. Of
// equal logits, the lowest ids come first.
void baton_logprobs(const baton::LogprobArgs* args);

// dst += src * scale. The product is rounded.
void baton_add(baton::Bf16* dst, const baton::Bf16* src, std::int64_t count, float scale,
               std::int32_t num_threads);

// Chooses the experts of each token. Equal scores: the lower expert id first.
void baton_route(const baton::RouteArgs* args);

// Weighted sum of the outputs of each token's experts, in ascending order of their ids. Reads the
// weights of each expert once.
void baton_mix_experts(const baton::MixArgs* args);

// Writes the keys and values of the batch into the cache.
void baton_write_kv(const baton::WriteKvArgs* args);

// Attention of each token over its own context: over the last `window` slots of it, and from the
// last multiple of `chunk` on, up to itself or `seen_ends`. The keys and values of the batch are
// already in the cache.
void baton_attention(const baton::AttentionArgs* args);

// Computes layers in place. hidden: [tokens, hidden_size]. passes: by KV group. taps: by layer, or
// null.
void baton_layers(const baton::LayerArgs* layers, std::int64_t num_layers,
                  const baton::PassArgs* passes, baton::Bf16* hidden, const baton::Bf16* inputs,
                  const baton::TapArgs* taps);

// Computes the attention of a layer in place, and the norm of the MLP's input into mlp_input,
// unless the layer has no such norm.
void baton_layer_attention(const baton::LayerArgs* layer, const baton::PassArgs* passes,
                           baton::Bf16* hidden, baton::Bf16* mlp_input);

// Computes only the keys and values of a layer and writes them into the cache.
void baton_layer_write_kv(const baton::LayerArgs* layer, const baton::PassArgs* passes,
                          const baton::Bf16* hidden);

// Linear attention of a layer by the gated delta rule, after a causal convolution; see StateShape.
void baton_delta(const baton::DeltaArgs* args);

// A Mamba2 layer between its projections, after a causal convolution; see StateShape.
void baton_mamba(const baton::MambaArgs* args);

// A short convolution between its projections; see StateShape.
void baton_short_conv(const baton::ShortConvArgs* args);

// dst *= sigmoid(gates)
void baton_multiply_sigmoid(const baton::SigmoidArgs* args);

// Copies blocks and returns their digests, XXH3 with 128 bits, big-endian.
void baton_copy_blocks(const baton::CopyArgs* args);

// Bytes of memory that `size` ranks share, which must be zeroed.
std::int64_t baton_rank_bytes(std::int64_t size, std::int64_t buffer_bytes);

// Sum of the numbers of all ranks, in the order of ranks and rounded once: all get the same bits.
// Returns 0, or `missing`; then the numbers are undefined, and so are those of all later calls.
std::int64_t baton_all_reduce(baton::RankLinks* links, void* numbers, std::int64_t count,
                              std::int32_t is_float32, std::int32_t num_threads);

// Gives dst, [ranks, num_bytes], the bytes of all ranks. dst can be null.
std::int64_t baton_all_gather(baton::RankLinks* links, const void* src, void* dst,
                              std::int64_t num_bytes);

// Gives all ranks the bytes of the first one.
std::int64_t baton_broadcast(baton::RankLinks* links, void* bytes, std::int64_t num_bytes);

// Lets all ranks that wait or will call know that a rank has ended.
void baton_end_rank(void* shared, std::int64_t rank);

// Returns 1 if it was called for the rank.
std::int64_t baton_rank_has_ended(const void* shared, std::int64_t rank);

// Returns a number that grows while the rank waits for another one.
std::int64_t baton_rank_beats(const void* shared, std::int64_t rank);

// Reads all memory once, to measure the bandwidth. `memory` has num_vectors * 64 bytes.
std::uint32_t baton_read_memory(const void* memory, std::int64_t num_vectors,
                                std::int32_t num_threads);

// Computes num_products products of sixteen bf16 pairs per thread, all in registers, to measure the
// arithmetic peak.
float baton_multiply_registers(std::int64_t num_products, std::int32_t num_threads);

}  // extern "C"
