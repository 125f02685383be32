"""Triton kernels of the products of adapters.

Each token is computed for itself, in float32 and with a fixed order of additions, so that its bits
do not depend on the batch. The adapters stay where they are: a table in device memory for each has
the addresses of its matrices (`triton_low_rank.make_table`).
"""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl

from baton.engine.runner.triton.elementwise_kernels import load_wide

PART_FIELDS = tl.constexpr(5)  # address of down, address of up, rank, first row, number of rows


@triton.jit
def find_parts(tables, groups, index, place):
    """Return the address of the parts that a token's adapter has for a place, and their number."""
    table = tl.load(tables + tl.load(groups + index)).to(tl.pointer_type(tl.int64))
    has_place = place < tl.load(table)
    first = tl.load(table + 1 + 2 * place, mask=has_place, other=0)
    return table + first, tl.load(table + 2 + 2 * place, mask=has_place, other=0).to(tl.int32)


# Which places and how many parts an adapter has must not compile a kernel again.
@triton.jit(do_not_specialize=["place", "max_parts"])
def project_kernel(
    hidden,
    src,
    tables,
    groups,
    tokens,
    place,
    src_stride,
    num_columns,
    max_parts,
    hidden_stride,
    tile_ranks: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Products of a token with some rows of the first matrix of a part: [tokens, parts, rank]."""
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dtype: tl.constexpr = src.dtype.element_ty
    parts, num_parts = find_parts(tables, groups, index, place)
    if part < num_parts:
        own = parts + part * PART_FIELDS
        down, rank = tl.load(own).to(tl.pointer_type(dtype)), tl.load(own + 2)
        src += tl.load(tokens + index) * src_stride
        ranks = tl.program_id(2) * tile_ranks + tl.arange(0, tile_ranks)
        sums = tl.zeros((tile_ranks, tile_columns), tl.float32)
        for start in range(0, num_columns, tile_columns):
            columns = start + tl.arange(0, tile_columns)
            is_column = columns < num_columns
            is_inside = (ranks < rank)[:, None] & is_column[None, :]
            weights = load_wide(down + ranks[:, None] * num_columns + columns[None, :], is_inside)
            sums += load_wide(src + columns, is_column)[None, :] * weights
        hidden += (index * max_parts + part) * hidden_stride
        tl.store(hidden + ranks, tl.sum(sums, axis=1), mask=ranks < rank)


@triton.jit(do_not_specialize=["place", "max_parts"])
def expand_kernel(
    dst,
    hidden,
    tables,
    groups,
    tokens,
    place,
    dst_stride,
    num_rows,
    max_parts,
    hidden_stride,
    tile_rows: tl.constexpr,
):
    """Add the products of all parts to some rows of a token's output."""
    index = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = dst.dtype.element_ty
    parts, num_parts = find_parts(tables, groups, index, place)
    if num_parts > 0:
        rows = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
        dst += tl.load(tokens + index) * dst_stride
        totals = load_wide(dst + rows, rows < num_rows)
        for part in range(num_parts):
            own = parts + part * PART_FIELDS
            up, rank = tl.load(own + 1).to(tl.pointer_type(dtype)), tl.load(own + 2).to(tl.int32)
            own_rows, count = rows - tl.load(own + 3), tl.load(own + 4)
            is_inside = (own_rows >= 0) & (own_rows < count)
            numbers = hidden + (index * max_parts + part) * hidden_stride
            for each in range(rank):
                weights = load_wide(up + each * count + own_rows, is_inside)
                totals += tl.load(numbers + each) * weights
        tl.store(dst + rows, totals, mask=rows < num_rows)
