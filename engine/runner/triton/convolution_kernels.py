"""Triton kernels of recurrent layers: the causal convolution before the recurrence.

`convolve_kernel` convolves a head of a token, and keeps the inputs that the next pass needs.
Arguments that differ from pass to pass are not specialised: each variant would be compiled.
"""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl

from baton.engine.runner.triton.elementwise_kernels import rounded

RUN_ARRAYS = ["first_runs", "first_tokens", "num_tokens", "reads", "writes"]


@triton.jit
def find_rows(
    blocks, table, rows, is_used, block_stride, rows_per_block: tl.constexpr, row_size: tl.constexpr
):
    """Return pointers to rows of a state, and which exist: used ones of a state with blocks."""
    block_ids = tl.load(table + rows // rows_per_block, mask=is_used, other=-1).to(tl.int64)
    found = blocks + block_ids * block_stride + rows % rows_per_block * row_size
    return found, block_ids >= 0


@triton.jit
def find_kept(
    blocks,
    table,
    first_row,
    numbers,
    is_used,
    block_stride,
    rows_per_block: tl.constexpr,
    row_size: tl.constexpr,
):
    """Return pointers to numbers of the kept inputs, which begin at a row, and which exist."""
    rows = first_row + numbers // row_size
    found, exist = find_rows(blocks, table, rows, is_used, block_stride, rows_per_block, row_size)
    return found + numbers % row_size, exist


@triton.jit
def load_inputs(
    projected,
    blocks,
    table,
    first_row,
    place,
    channels,
    is_used,
    projected_stride,
    block_stride,
    num_channels: tl.constexpr,
    num_kept: tl.constexpr,
    rows_per_block: tl.constexpr,
    row_size: tl.constexpr,
):
    """Return channels of the token at this place of its sequence's part of the pass.

    `projected` begins with that part. Negative places are before the pass.
    """
    numbers = (num_kept + place) * num_channels + channels
    is_kept = is_used & (place < 0)
    kept, exist = find_kept(
        blocks, table, first_row, numbers, is_kept, block_stride, rows_per_block, row_size
    )
    before = tl.load(kept, mask=exist, other=0.0)
    own = projected + place * projected_stride + channels
    return tl.where(place < 0, before, tl.load(own, mask=is_used & (place >= 0), other=0.0))


@triton.jit
def softplus(wide):
    """Return log(1 + exp(x)), exact for small exponentials, too."""
    power = tl.exp(wide)
    total = 1.0 + power
    # Corrects the rounding of the sum.
    exact = tl.where(total == 1.0, power, tl.log(total) * (power / (total - 1.0)))
    return tl.where(wide > 20.0, wide, exact)


@triton.jit
def store_factors(
    factors, gates, bias, decay_rate, head, is_delta: tl.constexpr, num_heads: tl.constexpr
):
    """Store a value head's decay, and its write strength or step, of the token of these gates."""
    num_strengths: tl.constexpr = num_heads if is_delta else 0
    gate = tl.load(gates + num_strengths + head).to(tl.float32)
    step = softplus(gate + tl.load(bias + head))
    tl.store(factors + 2 * head, tl.exp(-tl.load(decay_rate + head) * step))
    if is_delta:
        strength = tl.sigmoid(tl.load(gates + head).to(tl.float32))
        step = rounded(strength, gates.dtype.element_ty)
    tl.store(factors + 2 * head + 1, step)


@triton.jit
def find_channels(
    head,
    num_key_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    padded_dim: tl.constexpr,
):
    """Return the channels of a head. Heads are those of queries, of keys and of values."""
    num_unit: tl.constexpr = 2 * num_key_heads
    columns = tl.arange(0, padded_dim)
    num_before = tl.maximum(head - num_unit, 0)
    first = tl.minimum(head, num_unit) * key_dim + num_before * value_dim
    return first + columns, columns < tl.where(head < num_unit, key_dim, value_dim)


@triton.jit
def scale_heads(numbers, head, epsilon, query_scale, num_key_heads: tl.constexpr):
    """Divide queries and keys by their lengths, and scale queries."""
    factor = tl.rsqrt(tl.sum(numbers * numbers, axis=0) + epsilon)
    numbers *= tl.where(head < 2 * num_key_heads, factor, 1.0)
    return numbers * tl.where(head < num_key_heads, query_scale, 1.0)


@triton.jit
def convolve(
    projected,
    blocks,
    table,
    conv,
    conv_bias,
    first_row,
    place,
    channels,
    is_used,
    projected_stride,
    block_stride,
    is_delta: tl.constexpr,
    num_channels: tl.constexpr,
    num_kept: tl.constexpr,
    rows_per_block: tl.constexpr,
    row_size: tl.constexpr,
    padded_taps: tl.constexpr,
):
    """Return SiLU of the causal convolution of some channels of a token, in float32."""
    dtype: tl.constexpr = projected.dtype.element_ty
    taps = tl.arange(0, padded_taps)[:, None]
    is_tap = (taps <= num_kept) & is_used[None, :]
    inputs = load_inputs(
        projected,
        blocks,
        table,
        first_row,
        place - num_kept + taps,
        channels[None, :],
        is_tap,
        projected_stride,
        block_stride,
        num_channels,
        num_kept,
        rows_per_block,
        row_size,
    )
    weights = tl.load(conv + taps * num_channels + channels[None, :], mask=is_tap, other=0.0)
    total = tl.sum(weights.to(tl.float32) * inputs.to(tl.float32), axis=0)
    if not is_delta:
        total += tl.load(conv_bias + channels, mask=is_used, other=0.0)
    total = rounded(total, dtype)
    return rounded(total * tl.sigmoid(total), dtype)


@triton.jit
def keep_inputs(
    projected,
    blocks,
    read_table,
    write_table,
    first_row,
    end,
    head,
    projected_stride,
    block_stride,
    num_heads: tl.constexpr,
    num_channels: tl.constexpr,
    num_kept: tl.constexpr,
    num_kept_rows: tl.constexpr,
    rows_per_block: tl.constexpr,
    row_size: tl.constexpr,
    num_columns: tl.constexpr,
):
    """Store some of the last inputs before this place, and zeros in the rest of the last row."""
    size: tl.constexpr = num_kept_rows * row_size
    for start in range(head * num_columns, size, num_heads * num_columns):
        numbers = start + tl.arange(0, num_columns)
        inputs = load_inputs(
            projected,
            blocks,
            read_table,
            first_row,
            end - num_kept + numbers // num_channels,
            numbers % num_channels,
            numbers < num_kept * num_channels,
            projected_stride,
            block_stride,
            num_channels,
            num_kept,
            rows_per_block,
            row_size,
        )
        kept, exist = find_kept(
            blocks,
            write_table,
            first_row,
            numbers,
            numbers < size,
            block_stride,
            rows_per_block,
            row_size,
        )
        tl.store(kept, inputs, mask=exist)


@triton.jit(
    do_not_specialize=["num_pass_tokens", "first_row"],
    do_not_specialize_on_alignment=["sequences", *RUN_ARRAYS],
)
def convolve_kernel(
    mixed,
    factors,
    projected,
    gates,
    blocks,
    conv,
    conv_bias,
    bias,
    decay_rate,
    sequences,
    first_runs,
    first_tokens,
    num_tokens,
    reads,
    writes,
    num_pass_tokens,
    first_row,
    projected_stride,
    gate_stride,
    table_stride,
    block_stride,
    epsilon,
    query_scale,
    is_delta: tl.constexpr,
    num_key_heads: tl.constexpr,
    num_value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    num_kept: tl.constexpr,
    num_kept_rows: tl.constexpr,
    rows_per_block: tl.constexpr,
    row_size: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_taps: tl.constexpr,
):
    """Convolve a head of a token, or keep a part of a run's inputs: first tokens, then runs."""
    unit, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_channels: tl.constexpr = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    num_heads: tl.constexpr = 2 * num_key_heads + num_value_heads
    first_run = tl.load(first_runs + tl.load(sequences + unit))
    first_token = tl.load(first_tokens + first_run)
    projected += first_token * projected_stride
    table = reads + first_run * table_stride
    if unit >= num_pass_tokens:
        run = unit - num_pass_tokens
        keep_inputs(
            projected,
            blocks,
            table,
            writes + run * table_stride,
            first_row,
            tl.load(first_tokens + run) + tl.load(num_tokens + run) - first_token,
            head,
            projected_stride,
            block_stride,
            num_heads,
            num_channels,
            num_kept,
            num_kept_rows,
            rows_per_block,
            row_size,
            padded_dim,
        )
    else:
        channels, is_used = find_channels(head, num_key_heads, key_dim, value_dim, padded_dim)
        numbers = convolve(
            projected,
            blocks,
            table,
            conv,
            conv_bias,
            first_row,
            unit - first_token,
            channels,
            is_used,
            projected_stride,
            block_stride,
            is_delta,
            num_channels,
            num_kept,
            rows_per_block,
            row_size,
            padded_taps,
        )
        if is_delta:
            numbers = scale_heads(numbers, head, epsilon, query_scale, num_key_heads)
        tl.store(mixed + unit * num_channels + channels, numbers, mask=is_used)
        value_head = head - 2 * num_key_heads
        if value_head >= 0:
            token_factors = factors + unit * (2 * num_value_heads)
            token_gates = gates + unit * gate_stride
            store_factors(
                token_factors, token_gates, bias, decay_rate, value_head, is_delta, num_value_heads
            )
