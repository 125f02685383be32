"""Triton kernel that writes keys and values into the KV cache.

It finds a token's slot from the block table and the position, which the host does not send.
"""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl

from baton.engine.runner.triton.attention_tiles import find_token


@triton.jit(
    do_not_specialize=["num_sequences", "num_single", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "query_starts", "context_lens"],
)
def write_kernel(
    kv,
    slots,
    block_table,
    query_starts,
    context_lens,
    num_sequences,
    num_single,
    table_stride,
    block_stride,
    head_stride,
    place,
    token_stride,
    slot_stride,
    slot_size: tl.constexpr,
    padded_size: tl.constexpr,
    block_size: tl.constexpr,
):
    """Write the keys or the values of a token and a KV head into their slot."""
    token, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, padded_size)
    is_inside = columns < slot_size
    slot = slots + token.to(tl.int64) * token_stride + head * slot_stride + columns
    numbers = tl.load(slot, mask=is_inside, other=0)
    sequence = find_token(query_starts, token, num_sequences, num_single).to(tl.int64)
    end = tl.load(query_starts + sequence + 1).to(tl.int32)
    position = tl.load(context_lens + sequence).to(tl.int32) - end + token
    entry = block_table + sequence * table_stride + position // block_size
    block, offset = tl.load(entry).to(tl.int64), position % block_size
    dst = kv + block * block_stride + place + head * head_stride + offset * slot_size
    tl.store(dst + columns, numbers, mask=is_inside)
