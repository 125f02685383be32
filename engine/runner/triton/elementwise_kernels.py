"""Triton kernels of norms, RoPE, gates, sums and peaks.

Numbers are computed in float32 and rounded where torch rounds. A program computes one row, or a
piece of one, in an order that depends on the size of the row only.
"""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl


@triton.jit
def rounded(wide, dtype: tl.constexpr):
    """Round float32 numbers to the dtype and return them as float32."""
    return wide.to(dtype).to(tl.float32)


@triton.jit
def apply_weight(normed, weight, dtype: tl.constexpr, rounds_once: tl.constexpr):
    """Multiply normalised numbers with the weight of an RMS norm."""
    if not rounds_once:
        normed = rounded(normed, dtype)
    return rounded(normed * weight, dtype)


@triton.jit
def tanh(wide):
    return 2.0 * tl.sigmoid(2.0 * wide) - 1.0


@triton.jit
def load_wide(numbers, is_inside):
    return tl.load(numbers, mask=is_inside, other=0.0).to(tl.float32)


@triton.jit
def norm_row(wide, weight, columns, size, epsilon, dtype: tl.constexpr, rounds_once: tl.constexpr):
    """Return the RMS norm of a row of float32 numbers, which are zeros from `size` on."""
    weights = load_wide(weight + columns, columns < size)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + epsilon)
    return apply_weight(normed, weights, dtype, rounds_once)


@triton.jit
def rms_norm_kernel(
    dst,
    src,
    weight,
    src_stride,
    size,
    epsilon,
    rounds_once: tl.constexpr,
    padded_size: tl.constexpr,
):
    """RMS norm of a row of [rows, size]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_size)
    is_inside = columns < size
    wide = load_wide(src + row * src_stride + columns, is_inside)
    output = norm_row(wide, weight, columns, size, epsilon, src.dtype.element_ty, rounds_once)
    tl.store(dst + row * size + columns, output, mask=is_inside)


@triton.jit
def add_scaled(src, output, is_inside, scale):
    """Return a piece of a row plus a scaled output, in float32."""
    added = load_wide(output, is_inside)
    return load_wide(src, is_inside) + rounded(added * scale, output.dtype.element_ty)


@triton.jit
def add_and_norm_kernel(
    dst,
    normed,
    src,
    output,
    weight,
    src_stride,
    output_stride,
    size,
    scale,
    epsilon,
    rounds_once: tl.constexpr,
    padded_size: tl.constexpr,
):
    """Sum of a row and of a scaled output, and the RMS norm of the sum."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = src.dtype.element_ty
    columns = tl.arange(0, padded_size)
    is_inside = columns < size
    src, output = src + row * src_stride + columns, output + row * output_stride + columns
    wide = rounded(add_scaled(src, output, is_inside, scale), dtype)
    tl.store(dst + row * size + columns, wide, mask=is_inside)
    output = norm_row(wide, weight, columns, size, epsilon, dtype, rounds_once)
    tl.store(normed + row * size + columns, output, mask=is_inside)


@triton.jit
def rotate_half(own, other, cos, sin, dtype: tl.constexpr):
    """Return own * cos + other * sin, each product rounded."""
    return rounded(own * cos, dtype) + rounded(other * sin, dtype)


@triton.jit
def norm_heads(
    first,
    second,
    weight,
    columns,
    half,
    epsilon,
    dtype: tl.constexpr,
    rounds_once: tl.constexpr,
):
    """RMS norm of heads, each [heads, half] for their first and second halves."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    factors = tl.rsqrt(squares / (2 * half) + epsilon)[:, None]
    weights = load_wide(weight + columns, columns < half)[None, :]
    first = apply_weight(first * factors, weights, dtype, rounds_once)
    weights = load_wide(weight + half + columns, columns < half)[None, :]
    return first, apply_weight(second * factors, weights, dtype, rounds_once)


@triton.jit
def rope_kernel(
    query_dst,
    key_dst,
    query,
    key,
    query_weight,
    key_weight,
    cos,
    sin,
    query_strides,
    key_strides,
    cos_stride,
    sin_stride,
    num_query_heads,
    num_key_heads,
    half,
    epsilon,
    has_norm: tl.constexpr,
    rounds_once: tl.constexpr,
    tile_heads: tl.constexpr,
    padded_half: tl.constexpr,
):
    """RoPE of some heads of queries or keys, with an RMS norm of each before it.

    Both are [tokens, heads, 2 * half]. Tiles of keys follow those of queries.
    """
    token = tl.program_id(0).to(tl.int64)
    tile, num_query_tiles = tl.program_id(1), tl.cdiv(num_query_heads, tile_heads)
    if tile < num_query_tiles:
        dst, src, weight, num_heads = query_dst, query, query_weight, num_query_heads
        token_stride, head_stride = query_strides[0], query_strides[1]
    else:
        dst, src, weight, num_heads = key_dst, key, key_weight, num_key_heads
        token_stride, head_stride = key_strides[0], key_strides[1]
        tile -= num_query_tiles
    dtype: tl.constexpr = query.dtype.element_ty
    columns = tl.arange(0, padded_half)
    heads = tile * tile_heads + tl.arange(0, tile_heads)
    is_inside = (heads < num_heads)[:, None] & (columns < half)[None, :]
    start = src + token * token_stride + heads[:, None] * head_stride + columns[None, :]
    first, second = load_wide(start, is_inside), load_wide(start + half, is_inside)
    if has_norm:
        first, second = norm_heads(
            first, second, weight, columns, half, epsilon, dtype, rounds_once
        )
    cosines, sines = cos + token * cos_stride + columns, sin + token * sin_stride + columns
    cos_first = load_wide(cosines, columns < half)[None, :]
    sin_first = load_wide(sines, columns < half)[None, :]
    cos_second = load_wide(cosines + half, columns < half)[None, :]
    sin_second = load_wide(sines + half, columns < half)[None, :]
    output = dst + (token * num_heads + heads[:, None]) * (2 * half) + columns[None, :]
    tl.store(output, rotate_half(first, -second, cos_first, sin_first, dtype), mask=is_inside)
    second = rotate_half(second, first, cos_second, sin_second, dtype)
    tl.store(output + half, second, mask=is_inside)


@triton.jit
def gelu_tanh(wide):
    inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
    return 0.5 * wide * (1.0 + tanh(inner))


@triton.jit
def clamped_swiglu(first, up, alpha, limit, dtype: tl.constexpr):
    """Gate of gpt-oss. Comparisons, unlike minima, keep NaN."""
    first = tl.where(first > limit, limit, first)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    sigmoids = rounded(tl.sigmoid(rounded(first * alpha, dtype)), dtype)
    return rounded(up + 1.0, dtype) * rounded(first * sigmoids, dtype)


@triton.jit
def gate_kernel(
    dst,
    gate_up,
    row_stride,
    size,
    alpha,
    limit,
    activation: tl.constexpr,
    num_columns: tl.constexpr,
):
    """Gate of a piece of a row: [rows, 2 * size] → [rows, size]."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = gate_up.dtype.element_ty
    columns = tl.program_id(1) * num_columns + tl.arange(0, num_columns)
    is_inside = columns < size
    start = gate_up + row * row_stride + columns
    first, up = load_wide(start, is_inside), load_wide(start + size, is_inside)
    if activation == "silu":
        output = rounded(first * tl.sigmoid(first), dtype) * up
    elif activation == "gelu_pytorch_tanh":
        output = rounded(gelu_tanh(first), dtype) * up
    else:
        output = clamped_swiglu(first, up, alpha, limit, dtype)
    tl.store(dst + row * size + columns, output, mask=is_inside)


@triton.jit
def multiply_sigmoid_kernel(
    dst,
    src,
    gates,
    src_stride,
    gate_stride,
    size,
    is_scalar: tl.constexpr,
    num_columns: tl.constexpr,
):
    """Product of a piece of a row with the sigmoid of its gates, or of its only gate."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * num_columns + tl.arange(0, num_columns)
    is_inside = columns < size
    wide = load_wide(src + row * src_stride + columns, is_inside)
    gate_columns = columns * 0 if is_scalar else columns
    gate = load_wide(gates + row * gate_stride + gate_columns, is_inside)
    factor = rounded(tl.sigmoid(gate), gates.dtype.element_ty)
    tl.store(dst + row * size + columns, wide * factor, mask=is_inside)


@triton.jit
def add_kernel(dst, src, output, src_stride, output_stride, size, scale, num_columns: tl.constexpr):
    """Sum of a piece of a row and of a scaled output."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * num_columns + tl.arange(0, num_columns)
    is_inside = columns < size
    src, output = src + row * src_stride + columns, output + row * output_stride + columns
    tl.store(dst + row * size + columns, add_scaled(src, output, is_inside, scale), mask=is_inside)


@triton.jit
def find_peaks_kernel(token_ids, are_finite, logits, row_stride, size, num_columns: tl.constexpr):
    """Argmax of a row, the first of equal values, and whether all of the row is finite."""
    row = tl.program_id(0).to(tl.int64)
    best, best_id, num_strange = float("-inf"), 0, 0
    for start in range(0, size, num_columns):
        columns = start + tl.arange(0, num_columns)
        is_inside = columns < size
        numbers = tl.load(logits + row * row_stride + columns, mask=is_inside, other=0.0)
        is_strange = (numbers != numbers) | (tl.abs(numbers) == float("inf"))
        num_strange += tl.sum(is_strange.to(tl.int32), axis=0)
        is_ordered = is_inside & (numbers == numbers)
        numbers = tl.where(is_ordered, numbers, float("-inf"))
        highest = tl.max(numbers, axis=0)
        highest_id = start + tl.argmax(numbers, axis=0, tie_break_left=True)
        best_id = tl.where(highest > best, highest_id, best_id)
        best = tl.maximum(best, highest)
    tl.store(token_ids + row, best_id)
    tl.store(are_finite + row, num_strange == 0)
