"""Triton kernel that writes keys and values into the KV cache, and quantises them if it is int8.

It finds a token's slot from the block table and the position, which the host does not send.
"""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl

from baton.engine.runner.triton.attention.attention_tiles import find_token


@triton.jit
def round_to_even(numbers):
    """Round float32 numbers below 2^22, ties to even: such sums have no fraction."""
    return (numbers + 12582912.0) - 12582912.0


@triton.jit
def quantize_row(wide):
    """Return a row as int8 in float32, and the 16 bits of its scale.

    Divisions, which Triton approximates otherwise, are those of `byte_kv.quantize`.
    """
    sizes = tl.abs(wide)
    has_non_finite = tl.min((sizes < float("inf")).to(tl.int32), axis=0) == 0
    bits = tl.div_rn(tl.max(sizes, axis=0), 127.0).to(tl.int32, bitcast=True)
    bits = (bits + 0xFFFF) & -0x10000
    scale = bits.to(tl.float32, bitcast=True)
    is_zero = (scale == 0.0) | has_non_finite
    numbers = round_to_even(tl.div_rn(wide, tl.where(is_zero, 1.0, scale) + tl.zeros_like(wide)))
    bits = tl.where(has_non_finite, 0x7FC0, bits >> 16)
    return tl.where(is_zero, 0.0, numbers), bits


@triton.jit(
    do_not_specialize=["num_sequences", "num_single", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "query_starts", "context_lens"],
)
def write_kernel(
    kv,
    keys,
    values,
    block_table,
    query_starts,
    context_lens,
    num_sequences,
    num_single,
    table_stride,
    block_stride,
    tensor_stride,
    head_stride,
    place,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    size: tl.constexpr,
    padded_size: tl.constexpr,
    slot_size: tl.constexpr,
    block_size: tl.constexpr,
    is_int8: tl.constexpr,
):
    """Write the keys (0) or the values (1) of a token and a KV head into their slot."""
    token, head, tensor = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, padded_size)
    is_inside = columns < size
    if tensor == 0:
        src = keys + token.to(tl.int64) * key_token_stride + head * key_head_stride
    else:
        src = values + token.to(tl.int64) * value_token_stride + head * value_head_stride
    numbers = tl.load(src + columns, mask=is_inside, other=0)
    sequence = find_token(query_starts, token, num_sequences, num_single).to(tl.int64)
    end = tl.load(query_starts + sequence + 1).to(tl.int32)
    position = tl.load(context_lens + sequence).to(tl.int32) - end + token
    entry = block_table + sequence * table_stride + position // block_size
    block, offset = tl.load(entry).to(tl.int64), position % block_size
    dst = kv + block * block_stride + place + tensor * tensor_stride
    dst += head * head_stride + offset * slot_size
    if is_int8:
        numbers, scale = quantize_row(numbers.to(tl.float32))
        tl.store(dst + columns, numbers.to(tl.int8), mask=is_inside)
        tl.store(dst + size, scale.to(tl.int8))  # its low byte
        tl.store(dst + size + 1, (scale >> 8).to(tl.int8))
    else:
        tl.store(dst + columns, numbers, mask=is_inside)
