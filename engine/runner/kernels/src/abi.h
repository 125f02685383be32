// Exported functions of the library and their argument structs.
//
// `abi.py` mirrors this file. A change of a struct or a function here needs the same change there,
// and a new kAbiVersion in both: the loader refuses a library that differs.
//
// Fields are ordered by size, so that the only padding is at the end of a struct.
#pragma once

#include <cstdint>

namespace baton {

constexpr std::int32_t kAbiVersion = 2;

using Bf16 = std::uint16_t;  // bit pattern

// Paged KV cache, [blocks, layers, 2, kv_heads, block_size, head_dim].
struct PagedKv {
    Bf16* blocks;
    std::int64_t num_layers, num_kv_heads, block_size, head_dim;

    // Slots of a head in one block: keys (key_or_value = 0) or values (1).
    Bf16* slots(std::int64_t block, std::int64_t layer, int key_or_value, std::int64_t head) const {
        const std::int64_t plane = (block * num_layers + layer) * 2 + key_or_value;
        return blocks + (plane * num_kv_heads + head) * block_size * head_dim;
    }
};

// Flat batch of tokens, sequence after sequence. The first num_single sequences have one token.
struct BatchLayout {
    // By token.
    const std::int64_t *write_blocks, *write_offsets;
    // By sequence.
    const std::int64_t *block_tables, *context_lens, *query_starts, *num_queries;
    std::int64_t table_stride, num_sequences, num_single, num_tokens;
};

// Weight matrix in packed layout, with the bias of its rows.
struct PackedMatrix {
    void* packed;
    const Bf16* bias;   // or null
    std::int64_t bits;  // 16 for bf16, 8 or 4 if quantized
    std::int64_t num_rows, num_columns;
    std::int64_t group_size;  // columns with a common scale, if quantized
    std::int64_t is_mxfp4;    // 1: numbers are FP4 codes, scales are powers of two, no zero points
};

struct PackArgs {
    PackedMatrix matrix;
    const void* weights;        // [rows, columns]: bf16, or one byte each if quantized
    const float* scales;        // [rows, groups], or null
    const std::uint8_t* zeros;  // [rows, groups], or null
    std::int32_t num_threads;
};

struct LinearArgs {
    PackedMatrix matrix;
    const Bf16* src;  // [tokens, columns]
    Bf16* dst;        // [tokens, rows]
    std::int64_t num_tokens;
    std::int32_t num_threads;
};

struct RmsNormArgs {
    const Bf16 *src, *weight;
    Bf16* dst;
    std::int64_t num_rows, size;
    float epsilon;
    std::int32_t num_threads;
};

struct RopeArgs {
    const Bf16* src;              // [tokens, heads, head_dim], with a stride between tokens
    const Bf16* norm_weight;      // of an RMS norm of each head before the rotation, or null
    const Bf16 *cosines, *sines;  // [tokens, head_dim]
    Bf16* dst;                    // [tokens, heads, head_dim]
    std::int64_t src_stride, num_tokens, num_heads, head_dim;
    float epsilon;
    std::int32_t num_threads;
};

struct ArgmaxArgs {
    const float* logits;  // [rows, size]
    std::int64_t* indices;
    bool* are_finite;
    std::int64_t num_rows, size;
    std::int32_t num_threads;
};

struct WriteKvArgs {
    PagedKv kv;
    BatchLayout batch;
    const Bf16 *keys, *values;  // [tokens, kv_heads, head_dim], with strides between tokens
    std::int64_t layer, key_stride, value_stride;
    std::int32_t num_threads;
};

struct AttentionArgs {
    PagedKv kv;
    BatchLayout batch;
    const Bf16* queries;  // [tokens, heads, head_dim]
    Bf16* dst;            // same shape
    std::int64_t layer, num_heads;
    std::int64_t window;  // 0 for none
    float scale;          // of the scores
    std::int32_t num_threads;
};

// A decoder layer. The same in each pass.
struct LayerArgs {
    const Bf16 *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm, k_norm: or null
    PackedMatrix qkv, output, gate_up, down;
    std::int64_t index, num_heads, window;  // window: 0 for none
    float epsilon, scale;                   // of the norms; of the attention scores
};

// A forward pass, with buffers for intermediate results. The same for each layer.
struct PassArgs {
    PagedKv kv;
    BatchLayout batch;
    const Bf16 *cosines, *sines;  // [tokens, head_dim]
    // Each [tokens, ..]: hidden size or query rows; qkv or gate and up; rotated heads or gated.
    Bf16 *narrow_buf, *wide_buf, *heads_buf;
    std::int32_t num_threads;
};

}  // namespace baton

extern "C" {

std::int32_t baton_abi_version();

// Size of the struct of this name in bytes; 0 if there is none.
std::int64_t baton_struct_size(const char* name);

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

// RMS norm of each row.
void baton_rms_norm(const baton::RmsNormArgs* args);

// Rotary position embedding, after an RMS norm of each head if `norm_weight` is given.
void baton_rope(const baton::RopeArgs* args);

// SiLU(gate) * up. gate_up: [tokens, 2 * size], gate first; dst: [tokens, size].
void baton_swiglu(const baton::Bf16* gate_up, baton::Bf16* dst, std::int64_t num_tokens,
                  std::int64_t size, std::int32_t num_threads);

// Index of the first maximum of each row (undefined with a NaN), and whether all its numbers are
// finite.
void baton_argmax(const baton::ArgmaxArgs* args);

// dst += src.
void baton_add(baton::Bf16* dst, const baton::Bf16* src, std::int64_t count,
               std::int32_t num_threads);

// Writes the keys and values of the batch into the cache.
void baton_write_kv(const baton::WriteKvArgs* args);

// Attention of each token over its own context, or over the last `window` slots of it. The keys and
// values of the batch are already in the cache.
void baton_attention(const baton::AttentionArgs* args);

// Computes a layer in place. hidden: [tokens, hidden_size].
void baton_layer(const baton::LayerArgs* layer, const baton::PassArgs* pass, baton::Bf16* hidden);

// Computes only the keys and values of a layer and writes them into the cache.
void baton_layer_write_kv(const baton::LayerArgs* layer, const baton::PassArgs* pass,
                          const baton::Bf16* hidden);

// Reads all memory once, to measure the bandwidth. `memory` has num_vectors * 64 bytes.
std::uint32_t baton_read_memory(const void* memory, std::int64_t num_vectors,
                                std::int32_t num_threads);

// Computes num_products products of sixteen bf16 pairs per thread, all in registers, to measure the
// arithmetic peak.
float baton_multiply_registers(std::int64_t num_products, std::int32_t num_threads);

}  // extern "C"
