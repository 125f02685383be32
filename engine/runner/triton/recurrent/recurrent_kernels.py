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

from baton.engine.runner.triton.recurrent.convolution_kernels import RUN_ARRAYS, State, find_rows


@triton.jit
def find_matrix(state, columns, sizes: tl.constexpr):
    """Return pointers to columns of a head's state, and which exist."""
    keys = tl.arange(0, sizes.padded_key_dim)
    rows, exist = find_rows(state, keys, keys < sizes.key_dim, sizes.value_dim, sizes)
    return rows[:, None] + columns[None, :], exist[:, None] & (columns < sizes.value_dim)[None, :]


@triton.jit
def apply_token(state, heads, factors, head, columns, skip, sizes: tl.constexpr):
    """Return the state after a token and what the token reads. `heads` are its mixed numbers."""
    num_keys: tl.constexpr = sizes.num_key_heads * sizes.key_dim
    keys = tl.arange(0, sizes.padded_key_dim)
    is_key = keys < sizes.key_dim
    key_head = head // (sizes.num_value_heads // sizes.num_key_heads)
    queries = heads + key_head * sizes.key_dim + keys
    query = tl.load(queries, mask=is_key, other=0.0)
    key = tl.load(queries + num_keys, mask=is_key, other=0.0)
    values = heads + 2 * num_keys + head * sizes.value_dim + columns
    value = tl.load(values, mask=columns < sizes.value_dim, other=0.0)
    decay, factor = tl.load(factors + 2 * head), tl.load(factors + 2 * head + 1)
    state *= decay
    if sizes.is_delta:
        written = (value - tl.sum(key[:, None] * state, axis=0)) * factor
    else:
        written = value * factor
    state += key[:, None] * written[None, :]
    output = tl.sum(query[:, None] * state, axis=0)
    if not sizes.is_delta:
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
    sizes: tl.constexpr,
):
    """Compute some columns of a head's state over the runs of a sequence, and what is read."""
    columns = tl.program_id(0) * sizes.num_columns + tl.arange(0, sizes.num_columns)
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_row += head * sizes.key_dim
    first_run, end_run = tl.load(first_runs + sequence), tl.load(first_runs + sequence + 1)
    head_skip = 0.0 if sizes.is_delta else tl.load(skip + head)
    read_state = State(matrices, reads + first_run * table_stride, first_row, block_stride)
    places, is_read = find_matrix(read_state, columns, sizes)
    state = tl.load(places, mask=is_read, other=0.0)
    for run in range(first_run, end_run):
        first_token = tl.load(first_tokens + run)
        for token in range(first_token, first_token + tl.load(num_tokens + run)):
            heads = mixed + token * sizes.num_channels
            token_factors = factors + token * (2 * sizes.num_value_heads)
            state, output = apply_token(
                state, heads, token_factors, head, columns, head_skip, sizes
            )
            read = dst + (token * sizes.num_value_heads + head) * sizes.value_dim + columns
            tl.store(read, output, mask=columns < sizes.value_dim)
        written = State(matrices, writes + run * table_stride, first_row, block_stride)
        places, is_written = find_matrix(written, columns, sizes)
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
    has_norm: tl.constexpr,
    padded_size: tl.constexpr,
):
    """RMS norm of a group of a token, times SiLU of its gates, which Mamba2 applies first.

    Without a norm, Mamba2 has the gates alone.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, padded_size)
    is_inside = columns < size
    place = group * size + columns
    row = token * tl.num_programs(1) * size
    wide = tl.load(src + row + place, mask=is_inside, other=0.0)
    gate = tl.load(gates + token * gate_stride + place, mask=is_inside, other=0.0).to(tl.float32)
    factors = gate * tl.sigmoid(gate)
    if not is_delta:
        wide *= factors
    if has_norm:
        weights = tl.load(weight + group * weight_stride + columns, mask=is_inside, other=0.0)
        wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / size + epsilon)
        wide *= weights.to(tl.float32)
    if is_delta:
        wide *= factors
    tl.store(dst + row + place, wide, mask=is_inside)
