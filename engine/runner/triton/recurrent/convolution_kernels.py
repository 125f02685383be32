"""Triton kernels of recurrent layers: the causal convolution before the recurrence.

`convolve_kernel` convolves a head of a token, and keeps the inputs that the next pass needs.
Arguments that differ from pass to pass are not specialised: each variant would be compiled.
"""

# Triton reads the annotations, which must not be strings.

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Arrays of a pass, whose alignment differs from pass to pass: they are no fields of tuples, which
# Triton always specialises.
RUN_ARRAYS = ["first_runs", "first_tokens", "num_tokens", "reads", "writes"]


class State(NamedTuple):
    """State of a layer of a sequence."""

    blocks: Any
    table: Any  # ids of its blocks
    first_row: Any
    block_stride: Any


class Inputs(NamedTuple):
    """Inputs of a sequence's tokens: those of the pass, and in its state the last ones before."""

    projected: Any
    stride: Any
    state: Any


@triton.jit
def find_rows(state, rows, is_used, row_size: tl.constexpr, sizes: tl.constexpr):
    """Return pointers to rows of a state, and which exist: used ones of a state with blocks."""
    rows += state.first_row
    block_ids = tl.load(state.table + rows // sizes.rows_per_block, mask=is_used, other=-1)
    block_ids = block_ids.to(tl.int64)
    found = state.blocks + block_ids * state.block_stride + rows % sizes.rows_per_block * row_size
    return found, block_ids >= 0


@triton.jit
def find_kept(state, numbers, is_used, sizes: tl.constexpr):
    """Return pointers to numbers of the kept inputs, and which exist."""
    found, exist = find_rows(state, numbers // sizes.row_size, is_used, sizes.row_size, sizes)
    return found + numbers % sizes.row_size, exist


@triton.jit
def load_inputs(inputs, place, channels, is_used, sizes: tl.constexpr):
    """Return channels of the token at this place of its sequence's part of the pass.

    Negative places are before the pass.
    """
    numbers = (sizes.num_kept + place) * sizes.num_channels + channels
    kept, exist = find_kept(inputs.state, numbers, is_used & (place < 0), sizes)
    before = tl.load(kept, mask=exist, other=0.0)
    own = inputs.projected + place * inputs.stride + channels
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
def store_factors(factors, gates, weights, head, sizes: tl.constexpr):
    """Store a value head's decay, and its write strength or step, of the token of these gates."""
    num_strengths: tl.constexpr = sizes.num_value_heads if sizes.is_delta else 0
    gate = tl.load(gates + num_strengths + head).to(tl.float32)
    step = softplus(gate + tl.load(weights.bias + head))
    tl.store(factors + 2 * head, tl.exp(-tl.load(weights.decay_rate + head) * step))
    if sizes.is_delta:
        step = tl.sigmoid(tl.load(gates + head).to(tl.float32)) * sizes.strength_scale
    tl.store(factors + 2 * head + 1, step)


@triton.jit
def find_channels(head, sizes: tl.constexpr):
    """Return the channels of a head, and which of them it has."""
    num_unit: tl.constexpr = 2 * sizes.num_key_heads
    columns = tl.arange(0, sizes.padded_dim)
    num_before = tl.maximum(head - num_unit, 0)
    first = tl.minimum(head, num_unit) * sizes.key_dim + num_before * sizes.value_dim
    return first + columns, columns < tl.where(head < num_unit, sizes.key_dim, sizes.value_dim)


@triton.jit
def scale_heads(numbers, head, epsilon, query_scale, num_key_heads: tl.constexpr):
    """Divide queries and keys by their lengths, and scale queries."""
    factor = tl.rsqrt(tl.sum(numbers * numbers, axis=0) + epsilon)
    numbers *= tl.where(head < 2 * num_key_heads, factor, 1.0)
    return numbers * tl.where(head < num_key_heads, query_scale, 1.0)


@triton.jit
def convolve(inputs, weights, place, channels, is_used, sizes: tl.constexpr):
    """Return SiLU of the causal convolution of some channels of a token, in float32."""
    taps = tl.arange(0, sizes.padded_taps)[:, None]
    is_tap = (taps <= sizes.num_kept) & is_used[None, :]
    loaded = load_inputs(inputs, place - sizes.num_kept + taps, channels[None, :], is_tap, sizes)
    factors = weights.conv + taps * sizes.num_channels + channels[None, :]
    factors = tl.load(factors, mask=is_tap, other=0.0)
    total = tl.sum(factors.to(tl.float32) * loaded.to(tl.float32), axis=0)
    if not sizes.is_delta:
        total += tl.load(weights.conv_bias + channels, mask=is_used, other=0.0)
    return total * tl.sigmoid(total)


@triton.jit
def keep_inputs(inputs, written, end, head, sizes: tl.constexpr):
    """Store some of the last inputs before this place, and zeros in the rest of the last row."""
    size: tl.constexpr = sizes.num_kept_rows * sizes.row_size
    num_kept: tl.constexpr = sizes.num_kept * sizes.num_channels
    for start in range(head * sizes.padded_dim, size, sizes.num_heads * sizes.padded_dim):
        numbers = start + tl.arange(0, sizes.padded_dim)
        place = end - sizes.num_kept + numbers // sizes.num_channels
        channels = numbers % sizes.num_channels
        loaded = load_inputs(inputs, place, channels, numbers < num_kept, sizes)
        kept, exist = find_kept(written, numbers, numbers < size, sizes)
        tl.store(kept, loaded, mask=exist)


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
    weights,
    sequences,
    first_runs,
    first_tokens,
    num_tokens,
    reads,
    writes,
    num_pass_tokens,
    first_row,
    strides,
    epsilon,
    query_scale,
    sizes: tl.constexpr,
):
    """Convolve a head of a token, or keep a part of a run's inputs: first tokens, then runs."""
    unit, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_run = tl.load(first_runs + tl.load(sequences + unit))
    first_token = tl.load(first_tokens + first_run)
    state = State(blocks, reads + first_run * strides.table, first_row, strides.blocks)
    inputs = Inputs(projected + first_token * strides.projected, strides.projected, state)
    if unit >= num_pass_tokens:
        run = unit - num_pass_tokens
        end = tl.load(first_tokens + run) + tl.load(num_tokens + run) - first_token
        written = State(blocks, writes + run * strides.table, first_row, strides.blocks)
        keep_inputs(inputs, written, end, head, sizes)
    else:
        channels, is_used = find_channels(head, sizes)
        numbers = convolve(inputs, weights, unit - first_token, channels, is_used, sizes)
        if sizes.is_delta:
            numbers = scale_heads(numbers, head, epsilon, query_scale, sizes.num_key_heads)
        tl.store(mixed + unit * sizes.num_channels + channels, numbers, mask=is_used)
        value_head = head - 2 * sizes.num_key_heads
        if value_head >= 0:
            token_factors = factors + unit * (2 * sizes.num_value_heads)
            store_factors(token_factors, gates + unit * strides.gates, weights, value_head, sizes)
