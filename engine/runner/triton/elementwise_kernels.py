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
    wide = tl.load(src + row * src_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + epsilon)
    output = apply_weight(normed, weights, src.dtype.element_ty, rounds_once)
    tl.store(dst + row * size + columns, output, mask=is_inside)


@triton.jit
def rotate_half(own, other, cos, sin, dtype: tl.constexpr):
    """Return own * cos + other * sin, each product rounded."""
    return rounded(own * cos, dtype) + rounded(other * sin, dtype)


@triton.jit
def rope_kernel(
    dst,
    src,
    weight,
    cos,
    sin,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    num_heads,
    half,
    epsilon,
    has_norm: tl.constexpr,
    rounds_once: tl.constexpr,
    padded_half: tl.constexpr,
):
    """RoPE of a head of [tokens, heads, 2 * half], with an RMS norm before it."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = src.dtype.element_ty
    columns = tl.arange(0, padded_half)
    is_inside = columns < half
    start = src + token * token_stride + head * head_stride + columns
    first = tl.load(start, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(start + half, mask=is_inside, other=0.0).to(tl.float32)
    if has_norm:
        squares = tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)
        factor = tl.rsqrt(squares / (2 * half) + epsilon)
        weights = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
        first = apply_weight(first * factor, weights, dtype, rounds_once)
        weights = tl.load(weight + half + columns, mask=is_inside, other=0.0).to(tl.float32)
        second = apply_weight(second * factor, weights, dtype, rounds_once)
    cosines, sines = cos + token * cos_stride + columns, sin + token * sin_stride + columns
    cos_first = tl.load(cosines, mask=is_inside, other=0.0).to(tl.float32)
    sin_first = tl.load(sines, mask=is_inside, other=0.0).to(tl.float32)
    cos_second = tl.load(cosines + half, mask=is_inside, other=0.0).to(tl.float32)
    sin_second = tl.load(sines + half, mask=is_inside, other=0.0).to(tl.float32)
    output = dst + (token * num_heads + head) * (2 * half) + columns
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
    first = tl.load(start, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(start + size, mask=is_inside, other=0.0).to(tl.float32)
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
    wide = tl.load(src + row * src_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    gate_columns = columns * 0 if is_scalar else columns
    gate = tl.load(gates + row * gate_stride + gate_columns, mask=is_inside, other=0.0)
    factor = rounded(tl.sigmoid(gate.to(tl.float32)), gates.dtype.element_ty)
    tl.store(dst + row * size + columns, wide * factor, mask=is_inside)


@triton.jit
def add_kernel(dst, src, output, src_stride, output_stride, size, scale, num_columns: tl.constexpr):
    """Sum of a piece of a row and of a scaled output."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * num_columns + tl.arange(0, num_columns)
    is_inside = columns < size
    wide = tl.load(src + row * src_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    added = tl.load(output + row * output_stride + columns, mask=is_inside, other=0.0)
    scaled = rounded(added.to(tl.float32) * scale, output.dtype.element_ty)
    tl.store(dst + row * size + columns, wide + scaled, mask=is_inside)


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
