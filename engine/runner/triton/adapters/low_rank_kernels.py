"""Triton kernels of the products of adapters.

Each row is computed for itself, in float32 and with a fixed order of additions, so that its bits do
not depend on the batch. A row is a token of a linear layer, one of its heads, or one of its
experts. The adapters stay where they are: a table in device memory for each has the addresses of
its matrices (`low_rank_tables.make_table`), and each token of a pass has the address of a table, or
zero. So the launches do not depend on the adapters.
"""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl

from baton.engine.runner.triton.elementwise_kernels import load_wide, rounded

PART_FIELDS = tl.constexpr(5)  # address of down, address of up, rank, first row, number of rows


@triton.jit
def find_row(row, row_ids, expert_ids, num_per_token, kind: tl.constexpr):
    """Return a row's token, its head or expert, its input and its output, and the head of these.

    Rows of experts are sorted by expert: gate and up read tokens, and down writes them in the order
    of tokens and ranks.
    """
    if kind == "linear":
        token, number, src_row, dst_row, head = row, row, row, row, row * 0
    elif kind == "heads":
        token, number = row // num_per_token, row % num_per_token
        src_row, dst_row, head = token, token, number
    else:
        row_id = tl.load(row_ids + row)
        token, number = row_id // num_per_token, tl.load(expert_ids + row_id)
        if kind == "down":
            src_row, dst_row, head = row, row_id, row * 0
        else:
            src_row, dst_row, head = token, row, row * 0
    return token, number, src_row, dst_row, head


@triton.jit
def find_parts(tables, token, place, number, is_numbered: tl.constexpr):
    """Return the address of the parts that a token's adapter has for a place, and their number."""
    address = tl.load(tables + token)
    table = address.to(tl.pointer_type(tl.int64))
    has_place = place < tl.load(table, mask=address != 0, other=0)
    entry = table + 1 + 2 * place
    first = tl.load(entry, mask=has_place, other=0)
    count = tl.load(entry + 1, mask=has_place, other=0)
    if is_numbered:
        has_number = number < count
        entry = table + first + 2 * number
        first = tl.load(entry, mask=has_number, other=0)
        count = tl.load(entry + 1, mask=has_number, other=0)
    return table + first, count.to(tl.int32)


# Which places and how many parts an adapter has must not compile a kernel again.
@triton.jit(do_not_specialize=["place", "num_per_token", "max_parts"])
def project_kernel(
    hidden,
    src,
    tables,
    row_ids,
    expert_ids,
    scales,
    place,
    num_per_token,
    src_stride,
    src_head_stride,
    num_columns,
    max_parts,
    hidden_stride,
    kind: tl.constexpr,
    scales_input: tl.constexpr,
    tile_ranks: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Products of a row with some rows of the first matrix of a part: [rows, parts, rank]."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dtype: tl.constexpr = src.dtype.element_ty
    token, number, src_row, _, head = find_row(row, row_ids, expert_ids, num_per_token, kind)
    parts, num_parts = find_parts(tables, token, place, number, kind != "linear")
    own, first_rank = parts + part * PART_FIELDS, tl.program_id(2) * tile_ranks
    rank = tl.load(own + 2, mask=part < num_parts, other=0)
    if first_rank < rank:
        down = tl.load(own).to(tl.pointer_type(dtype))
        src += src_row * src_stride + head * src_head_stride
        ranks = first_rank + tl.arange(0, tile_ranks)
        sums = tl.zeros((tile_ranks, tile_columns), tl.float32)
        for start in range(0, num_columns, tile_columns):
            columns = start + tl.arange(0, tile_columns)
            is_column = columns < num_columns
            is_inside = (ranks < rank)[:, None] & is_column[None, :]
            weights = load_wide(down + ranks[:, None] * num_columns + columns[None, :], is_inside)
            state = load_wide(src + columns, is_column)
            if scales_input:
                factor = rounded(tl.load(scales + tl.load(row_ids + row)), dtype)
                state = rounded(state * factor, dtype)
            sums += state[None, :] * weights
        hidden += (row * max_parts + part) * hidden_stride
        tl.store(hidden + ranks, tl.sum(sums, axis=1), mask=ranks < rank)


@triton.jit(do_not_specialize=["place", "num_per_token", "max_parts"])
def expand_kernel(
    dst,
    hidden,
    tables,
    row_ids,
    expert_ids,
    place,
    num_per_token,
    dst_stride,
    dst_head_stride,
    num_rows,
    max_parts,
    hidden_stride,
    kind: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Add the products of all parts to some numbers of a row's output."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = dst.dtype.element_ty
    token, number, _, dst_row, head = find_row(row, row_ids, expert_ids, num_per_token, kind)
    parts, num_parts = find_parts(tables, token, place, number, kind != "linear")
    if num_parts > 0:
        rows = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
        dst += dst_row * dst_stride + head * dst_head_stride
        totals = load_wide(dst + rows, rows < num_rows)
        for part in range(num_parts):
            own = parts + part * PART_FIELDS
            up, rank = tl.load(own + 1).to(tl.pointer_type(dtype)), tl.load(own + 2).to(tl.int32)
            own_rows, count = rows - tl.load(own + 3), tl.load(own + 4)
            is_inside = (own_rows >= 0) & (own_rows < count)
            numbers = hidden + (row * max_parts + part) * hidden_stride
            for each in range(rank):
                weights = load_wide(up + each * count + own_rows, is_inside)
                totals += tl.load(numbers + each) * weights
        tl.store(dst + rows, totals, mask=rows < num_rows)
