"""Triton kernel of products with a matrix for each head."""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl

from baton.engine.runner.triton.products.product_kernels import multiply, store_products


@triton.jit(do_not_specialize=["num_tokens"])
def heads_kernel(
    dst,
    src,
    weights,
    num_tokens,
    token_stride,
    head_stride,
    matrix: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Linear layers of heads, [tokens, heads, columns] → [tokens, heads, rows]."""
    tokens = tl.program_id(0).to(tl.int64) * tile_tokens + tl.arange(0, tile_tokens)
    rows = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    head = tl.program_id(2).to(tl.int64)
    is_token = tokens < num_tokens
    products = multiply(
        src + head * head_stride + tokens * token_stride,
        is_token,
        tokens,
        tokens,
        weights + head * (matrix.num_rows * matrix.num_columns),
        rows,
        src.dtype.element_ty,
        matrix,
        tile_tokens,
        tile_rows,
        False,
        False,
    )
    dst_heads = dst + (tokens * tl.num_programs(2) + head) * matrix.num_rows
    store_products(dst_heads, products, dst, is_token, rows, matrix.num_rows, False)
