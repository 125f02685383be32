"""Triton kernels of recurrent layers: the gated delta rule and Mamba2.

A layer is three launches. The first one is the convolution (`convolution_kernels.py`).
`recur_kernel` computes a tile of a head's state, some of its columns, over all tokens of a
sequence, one after the other. `gated_norm_kernel` computes the gates and the norm. So a token's
bits depend neither on the batch nor on the chunks of its sequence.

Rows of states are those of `StateShape`, runs and sequences those of `StateLayout`. Arguments that
differ from pass to pass are not specialised: each variant would be compiled.
"""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl

from baton.engine.runner.triton.convolution_kernels import RUN_ARRAYS, find_rows
from baton.engine.runner.triton.elementwise_kernels import rounded


@triton.jit
def find_matrix(
    matrices,
    table,
    first_row,
    columns,
    block_stride,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    rows_per_block: tl.constexpr,
    padded_key_dim: tl.constexpr,
):
    """Return pointers to columns of a head's state, and which exist."""
    keys = tl.arange(0, padded_key_dim)
    rows, exist = find_rows(
        matrices, table, first_row + keys, keys < key_dim, block_stride, rows_per_block, value_dim
    )
    return rows[:, None] + columns[None, :], exist[:, None] & (columns < value_dim)[None, :]


@triton.jit
def apply_token(
    state,
    heads,
    factors,
    head,
    columns,
    skip,
    is_delta: tl.constexpr,
    num_key_heads: tl.constexpr,
    num_value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    padded_key_dim: tl.constexpr,
):
    """Return the state after a token and what the token reads. `heads` are its mixed numbers."""
    keys = tl.arange(0, padded_key_dim)
    is_key = keys < key_dim
    queries = heads + head // (num_value_heads // num_key_heads) * key_dim + keys
    query = tl.load(queries, mask=is_key, other=0.0)
    key = tl.load(queries + num_key_heads * key_dim, mask=is_key, other=0.0)
    values = heads + 2 * num_key_heads * key_dim + head * value_dim + columns
    value = tl.load(values, mask=columns < value_dim, other=0.0)
    decay, factor = tl.load(factors + 2 * head), tl.load(factors + 2 * head + 1)
    state *= decay
    if is_delta:
        written = (value - tl.sum(key[:, None] * state, axis=0)) * factor
    else:
        written = value * factor
    state += key[:, None] * written[None, :]
    output = tl.sum(query[:, None] * state, axis=0)
    if not is_delta:
        output += skip * value
    return state, output


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=RUN_ARRAYS)
def recur_kernel(
    dst,
    matrices,
    mixed,
    factors,
    skip,
    first_runs,
    first_tokens,
    num_tokens,
    reads,
    writes,
    first_row,
    table_stride,
    block_stride,
    is_delta: tl.constexpr,
    num_key_heads: tl.constexpr,
    num_value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    rows_per_block: tl.constexpr,
    padded_key_dim: tl.constexpr,
    num_columns: tl.constexpr,
):
    """Compute some columns of a head's state over the runs of a sequence, and what is read."""
    num_channels: tl.constexpr = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    columns = tl.program_id(0) * num_columns + tl.arange(0, num_columns)
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_row += head * key_dim
    first_run, end_run = tl.load(first_runs + sequence), tl.load(first_runs + sequence + 1)
    head_skip = 0.0 if is_delta else tl.load(skip + head)
    places, is_read = find_matrix(
        matrices,
        reads + first_run * table_stride,
        first_row,
        columns,
        block_stride,
        key_dim,
        value_dim,
        rows_per_block,
        padded_key_dim,
    )
    state = tl.load(places, mask=is_read, other=0.0)
    for run in range(first_run, end_run):
        first_token = tl.load(first_tokens + run)
        for token in range(first_token, first_token + tl.load(num_tokens + run)):
            state, output = apply_token(
                state,
                mixed + token * num_channels,
                factors + token * (2 * num_value_heads),
                head,
                columns,
                head_skip,
                is_delta,
                num_key_heads,
                num_value_heads,
                key_dim,
                value_dim,
                padded_key_dim,
            )
            read = dst + (token * num_value_heads + head) * value_dim + columns
            tl.store(read, output, mask=columns < value_dim)
        places, is_written = find_matrix(
            matrices,
            writes + run * table_stride,
            first_row,
            columns,
            block_stride,
            key_dim,
            value_dim,
            rows_per_block,
            padded_key_dim,
        )
        tl.store(places, state, mask=is_written)


@triton.jit
def gated_norm_kernel(
    dst,
    src,
    gates,
    weight,
    gate_stride,
    weight_stride,
    size,
    epsilon,
    is_delta: tl.constexpr,
    padded_size: tl.constexpr,
):
    """RMS norm of a group of a token, times SiLU of its gates, which Mamba2 applies first."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = dst.dtype.element_ty
    columns = tl.arange(0, padded_size)
    is_inside = columns < size
    place = group * size + columns
    row = token * tl.num_programs(1) * size
    wide = tl.load(src + row + place, mask=is_inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + token * gate_stride + place, mask=is_inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + group * weight_stride + columns, mask=is_inside, other=0.0)
    factors = gate * tl.sigmoid(gate)
    if not is_delta:
        wide *= factors
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + epsilon)
    if is_delta:
        weighted = rounded(rounded(normed, dtype) * weights.to(tl.float32), dtype) * factors
    else:
        weighted = normed * weights.to(tl.float32)
    tl.store(dst + row + place, weighted, mask=is_inside)
