"""Triton kernels of products with quantized matrices, and of experts.

A program multiplies a tile of tokens with a tile of rows of a matrix. It adds up pieces of columns
in their order, whatever the tiles are, so that a token's bits do not depend on the other tokens.
Weights are dequantized as torch does it, and rounded to the dtype of the activations.
"""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl

from baton.engine.runner.triton.elementwise_kernels import rounded


@triton.jit
def fp4_values(codes):
    """Return the values of 4-bit floats: a sign, two bits of exponent and one of mantissa."""
    magnitudes = (codes & 7).to(tl.int32)
    large = tl.where(magnitudes < 6, 2 * magnitudes - 4, 4 * magnitudes - 16)
    values = tl.where(magnitudes < 4, magnitudes, large).to(tl.float32) * 0.5
    return tl.where(codes < 8, values, -values)


@triton.jit
def load_numbers(packed, piece, rows, matrix: tl.constexpr):
    """Return the stored numbers of a piece, [rows, columns]."""
    num_bytes: tl.constexpr = matrix.piece * matrix.bits // 8
    first = packed + tl.cast(piece, tl.int64) * (matrix.padded_rows * num_bytes)
    numbers = tl.load(first + rows[:, None] * num_bytes + tl.arange(0, num_bytes)[None, :])
    if matrix.bits == 4:
        numbers = tl.interleave(numbers & 15, numbers >> 4)
    return numbers


@triton.jit
def load_factors(factors, piece, rows, matrix: tl.constexpr):
    """Return the factors of the groups of a piece for each of its columns, [rows, columns]."""
    num_groups: tl.constexpr = matrix.groups_per_piece
    groups = piece // matrix.pieces_per_group * num_groups + tl.arange(0, num_groups)
    found = tl.load(factors + groups[None, :] * matrix.padded_rows + rows[:, None])
    found = found.to(tl.float32)[:, :, None]
    size: tl.constexpr = matrix.piece // num_groups
    wide = tl.broadcast_to(found, [rows.shape[0], num_groups, size])
    return tl.reshape(wide, [rows.shape[0], matrix.piece])


@triton.jit
def dequantize(packed, piece, rows, dtype: tl.constexpr, matrix: tl.constexpr):
    """Return a piece of rows of a quantized matrix."""
    scales = (packed + matrix.scale_place).to(tl.pointer_type(matrix.scale_dtype))
    scale = load_factors(scales, piece, rows, matrix)
    numbers = load_numbers(packed, piece, rows, matrix)
    if matrix.kind == "mxfp4":
        wide = fp4_values(numbers) * scale
    elif matrix.kind == "zeros":
        zeros = load_factors(packed + matrix.second_place, piece, rows, matrix)
        wide = (numbers.to(tl.float32) - zeros) * scale
    else:
        offsets = (packed + matrix.second_place).to(tl.pointer_type(matrix.scale_dtype))
        wide = numbers.to(tl.float32) * scale + load_factors(offsets, piece, rows, matrix)
    return wide.to(dtype)


@triton.jit
def find_columns(piece, matrix: tl.constexpr):
    """Return the columns of a piece, and which of them exist: others are padding."""
    places = piece * matrix.piece + tl.arange(0, matrix.piece)
    if matrix.padded_group == matrix.group_size:
        columns = places
        is_inside = columns < matrix.num_columns
    else:
        in_group = places % matrix.padded_group
        columns = places // matrix.padded_group * matrix.group_size + in_group
        is_inside = (in_group < matrix.group_size) & (columns < matrix.num_columns)
    return columns, is_inside


@triton.jit
def load_weights(matrices, piece, rows, dtype: tl.constexpr, matrix: tl.constexpr):
    """Return a piece of rows of a matrix, [rows, columns]."""
    if matrix.kind == "plain":
        columns, is_inside = find_columns(piece, matrix)
        is_loaded = (rows < matrix.num_rows)[:, None] & is_inside[None, :]
        places = rows.to(tl.int64)[:, None] * matrix.num_columns + columns[None, :]
        weights = tl.load(matrices + places, mask=is_loaded, other=0.0)
    else:
        weights = dequantize(matrices, piece, rows, dtype, matrix)
    return weights


@triton.jit
def multiply(
    states,
    is_token,
    factors,
    order,
    weights,
    rows,
    dtype: tl.constexpr,
    matrix: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_rows: tl.constexpr,
    has_order: tl.constexpr,
    scales_input: tl.constexpr,
):
    """Return the products of tokens and rows, [tokens, rows]. `states` points to the tokens."""
    products = tl.zeros((tile_tokens, tile_rows), tl.float32)
    for piece in range(matrix.num_pieces):
        columns, is_inside = find_columns(piece, matrix)
        if has_order:
            columns = tl.load(order + columns, mask=is_inside, other=0)
        is_loaded = is_token[:, None] & is_inside[None, :]
        state = tl.load(states[:, None] + columns[None, :], mask=is_loaded, other=0.0)
        if scales_input:
            state = (state.to(tl.float32) * factors[:, None]).to(dtype)
        weight = load_weights(weights, piece, rows, dtype, matrix)
        products = tl.dot(state, tl.trans(weight), products, input_precision="ieee")
    return products


@triton.jit
def store_products(dst, products, bias, is_token, rows, num_rows, has_bias: tl.constexpr):
    """Store products, [tokens, rows]. `dst` points to the tokens."""
    is_row = rows < num_rows
    if has_bias:
        products += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    is_stored = is_token[:, None] & is_row[None, :]
    tl.store(dst[:, None] + rows[None, :], products, mask=is_stored)


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    dst,
    src,
    packed,
    bias,
    order,
    num_tokens,
    src_stride,
    matrix: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_rows: tl.constexpr,
    has_bias: tl.constexpr,
    has_order: tl.constexpr,
):
    """Linear layer of a quantized matrix, [tokens, columns] → [tokens, rows]."""
    tokens = tl.program_id(0).to(tl.int64) * tile_tokens + tl.arange(0, tile_tokens)
    rows = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    is_token = tokens < num_tokens
    products = multiply(
        src + tokens * src_stride,
        is_token,
        tokens,
        order,
        packed,
        rows,
        src.dtype.element_ty,
        matrix,
        tile_tokens,
        tile_rows,
        has_order,
        False,
    )
    dst_tokens = dst + tokens * matrix.num_rows
    store_products(dst_tokens, products, bias, is_token, rows, matrix.num_rows, has_bias)


@triton.jit
def rows_kernel(dst, row_ids, packed, order, matrix: tl.constexpr, has_order: tl.constexpr):
    """A piece of a row of a quantized matrix, dequantized."""
    index, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.load(row_ids + index) + tl.arange(0, 1)
    weights = dequantize(packed, piece, rows, dst.dtype.element_ty, matrix)
    columns, is_inside = find_columns(piece, matrix)
    if has_order:
        columns = tl.load(order + columns, mask=is_inside, other=0)
    dst_columns = dst + index * matrix.num_columns + columns
    tl.store(dst_columns[None, :], weights, mask=is_inside[None, :])


@triton.jit(do_not_specialize=["max_tiles"])
def plan_tiles_kernel(
    tiles,
    expert_starts,
    max_tiles,
    num_experts,
    tile_tokens: tl.constexpr,
    padded_experts: tl.constexpr,
):
    """Find the tiles of sorted rows: the expert of each, its first row, and their number.

    They are stored in `tiles`: `max_tiles` experts, as many first rows, and the number.
    """
    experts = tl.arange(0, padded_experts)
    is_expert = experts < num_experts
    first = tl.load(expert_starts + experts, mask=is_expert, other=0)
    end = tl.load(expert_starts + experts + 1, mask=is_expert, other=0)
    num_tiles = (end - first + tile_tokens - 1) // tile_tokens
    tile_ends = tl.cumsum(num_tiles, axis=0)
    for index in range(tl.max(num_tiles, axis=0)):
        places = tiles + tile_ends - num_tiles + index
        tl.store(places, experts, mask=index < num_tiles)
        tl.store(places + max_tiles, first + index * tile_tokens, mask=index < num_tiles)
    tl.store(tiles + 2 * max_tiles, tl.max(tile_ends, axis=0))


@triton.jit(do_not_specialize=["max_tiles"])
def experts_kernel(
    dst,
    src,
    matrices,
    biases,
    orders,
    scales,
    row_ids,
    expert_starts,
    tiles,
    max_tiles,
    src_stride,
    top_k,
    matrix: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_rows: tl.constexpr,
    has_bias: tl.constexpr,
    has_order: tl.constexpr,
    scales_input: tl.constexpr,
    is_down: tl.constexpr,
):
    """Linear layers of experts. A row is a token and the rank of an expert, sorted by expert.

    Gate and up read tokens and write sorted rows; down reads sorted rows and writes them in the
    order of tokens and ranks. `matrices` are addresses.
    """
    tile = tl.program_id(0)
    if tile >= tl.load(tiles + 2 * max_tiles):
        return
    expert = tl.load(tiles + tile)
    sorted_rows = tl.load(tiles + max_tiles + tile) + tl.arange(0, tile_tokens)
    is_token = sorted_rows < tl.load(expert_starts + expert + 1)
    row_id = tl.load(row_ids + sorted_rows, mask=is_token, other=0)
    src_tokens = sorted_rows.to(tl.int64) if is_down else row_id // top_k
    dst_tokens = row_id if is_down else sorted_rows.to(tl.int64)
    dtype: tl.constexpr = src.dtype.element_ty
    factors = row_id
    if scales_input:
        factors = rounded(tl.load(scales + row_id, mask=is_token, other=0.0), dtype)
    stored_dtype: tl.constexpr = dtype if matrix.kind == "plain" else tl.uint8
    weights = tl.load(matrices + expert).to(tl.pointer_type(stored_dtype))
    rows = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    products = multiply(
        src + src_tokens * src_stride,
        is_token,
        factors,
        orders + expert * matrix.num_columns,
        tl.multiple_of(weights, 16),
        rows,
        dtype,
        matrix,
        tile_tokens,
        tile_rows,
        has_order,
        scales_input,
    )
    bias = biases + expert * matrix.num_rows
    dst_rows = dst + dst_tokens * matrix.num_rows
    store_products(dst_rows, products, bias, is_token, rows, matrix.num_rows, has_bias)


@triton.jit
def sum_experts_kernel(
    dst, outputs, weights, size, top_k, weighs: tl.constexpr, num_columns: tl.constexpr
):
    """Sum of the outputs of a token's experts, best expert first, for a piece of the columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * num_columns + tl.arange(0, num_columns)
    is_inside = columns < size
    total = tl.zeros((num_columns,), tl.float32)
    for rank in range(top_k):
        row = token * top_k + rank
        output = tl.load(outputs + row * size + columns, mask=is_inside, other=0.0).to(tl.float32)
        if weighs:
            output *= rounded(tl.load(weights + row), dst.dtype.element_ty)
        total += output
    tl.store(dst + token * size + columns, total, mask=is_inside)
