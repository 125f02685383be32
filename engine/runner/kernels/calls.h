// Exported functions that other kernels call.
#pragma once

#include "lanes.h"

extern "C" {

void baton_linear(const baton::Bf16* activations, const void* packed, const baton::Bf16* bias,
                  baton::Bf16* dst, std::int64_t num_tokens, std::int64_t num_rows,
                  std::int64_t num_columns, int num_threads);

void baton_quantized_linear(const baton::Bf16* activations, const std::uint8_t* packed,
                            const baton::Bf16* bias, baton::Bf16* dst, std::int64_t num_tokens,
                            std::int64_t bits, std::int64_t num_rows, std::int64_t num_columns,
                            std::int64_t group, int num_threads);

void baton_norm(const baton::Bf16* src, const baton::Bf16* weight, baton::Bf16* dst,
                std::int64_t num_rows, std::int64_t size, float epsilon, int num_threads);

void baton_rotate(const baton::Bf16* src, std::int64_t token_stride, const baton::Bf16* weight,
                  const baton::Bf16* cosines, const baton::Bf16* sines, baton::Bf16* dst,
                  std::int64_t num_tokens, std::int64_t num_heads, std::int64_t size, float epsilon,
                  int num_threads);

void baton_gate(const baton::Bf16* gate_up, baton::Bf16* dst, std::int64_t num_tokens,
                std::int64_t size, int num_threads);

void baton_add(baton::Bf16* dst, const baton::Bf16* src, std::int64_t count, int num_threads);

void baton_write_kv(baton::Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                    std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                    const baton::Bf16* keys, std::int64_t key_stride, const baton::Bf16* values,
                    std::int64_t value_stride, const std::int64_t* write_blocks,
                    const std::int64_t* write_offsets, std::int64_t num_tokens, int num_threads);

void baton_attend_singles(baton::Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                          std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                          const baton::Bf16* queries, baton::Bf16* dst,
                          const std::int64_t* tables, std::int64_t table_stride,
                          const std::int64_t* lengths, std::int64_t window,
                          std::int64_t num_sequences, std::int64_t gqa_group_size, float scale,
                          int num_threads);

void baton_attend_chunk(baton::Bf16* blocks, std::int64_t num_layers, std::int64_t num_kv_heads,
                        std::int64_t block_size, std::int64_t head_dim, std::int64_t layer,
                        const baton::Bf16* queries, baton::Bf16* dst, const std::int64_t* table,
                        std::int64_t num_tokens, std::int64_t length, std::int64_t window,
                        std::int64_t gqa_group_size, float scale, int num_threads);

}  // extern "C"
