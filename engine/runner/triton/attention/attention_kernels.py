"""Triton kernels of paged attention.

Keys are read in segments of a fixed size. The sums over each segment are computed on their own,
and merged in the order of the segments. So an output has the same bits whether one program reads
all segments, or several do and another kernel merges their sums. A segment, or a piece of it, that
a row does not see leaves the row's sums as they are: an output depends on its own context only,
not on the batch or on the tile.

Arguments that differ from pass to pass are not specialised: each variant would be compiled. So they
are no fields of tuples, which Triton always specialises.
"""

# Triton reads the annotations, which must not be strings.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from baton.engine.runner.triton.attention.attention_arguments import Batch
from baton.engine.runner.triton.attention.attention_sums import (
    Sums,
    add_piece,
    first_sums,
    hide_unseen,
    merge_sums,
    no_sums,
    score,
)
from baton.engine.runner.triton.attention.attention_tiles import first_seen, locate_tile


class Query(NamedTuple):
    """Queries of a tile, in two parts as the keys. Without a rest, it is the front."""

    front: Any
    rest: Any


@triton.jit
def load_rows(rows, is_row, size: tl.constexpr, padded_size: tl.constexpr):
    columns = tl.arange(0, padded_size)
    is_inside = is_row[:, None] & (columns < size)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=is_inside, other=0)


@triton.jit
def store_rows(rows, numbers, is_row, size: tl.constexpr, padded_size: tl.constexpr):
    columns = tl.arange(0, padded_size)
    is_inside = is_row[:, None] & (columns < size)[None, :]
    tl.store(rows[:, None] + columns[None, :], numbers, mask=is_inside)


@triton.jit
def load_query(queries, tile, sizes: tl.constexpr):
    rows = queries + tile.query_rows * sizes.head_dim
    front = load_rows(rows, tile.is_row, sizes.value_dim, sizes.padded_value_dim)
    rest = front
    if sizes.padded_rest_dim > 0:
        rest_dim: tl.constexpr = sizes.head_dim - sizes.value_dim
        rest = load_rows(rows + sizes.value_dim, tile.is_row, rest_dim, sizes.padded_rest_dim)
    return Query(front, rest)


@triton.jit
def find_slots(tile, keys, is_loaded, batch, cache, sizes: tl.constexpr):
    """Return pointers to the slots of keys, without the place of the layer."""
    block_table = batch.block_table + tile.sequence.to(tl.int64) * batch.table_stride
    block = tl.load(block_table + keys // sizes.block_size, mask=is_loaded, other=0).to(tl.int64)
    slots = cache.kv + tile.kv_head * cache.head_stride + block * cache.block_stride
    return slots + keys % sizes.block_size * sizes.slot_size


@triton.jit
def load_scales(scales, is_loaded):
    """Return float32 numbers from the two bytes of bfloat16 ones."""
    low = tl.load(scales, mask=is_loaded, other=0).to(tl.int32) & 0xFF
    high = tl.load(scales + 1, mask=is_loaded, other=0).to(tl.int32) & 0xFF
    return ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)


@triton.jit
def load_slots(
    slots,
    is_loaded,
    first: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
    dtype: tl.constexpr,
    sizes: tl.constexpr,
):
    """Return `size` numbers of each slot, and zeros for those that are not loaded.

    Zeros, because a weight of zero does not hide a NaN.
    """
    numbers = load_rows(slots + first, is_loaded, size, padded_size)
    if sizes.is_int8:
        scales = load_scales(slots + sizes.head_dim, is_loaded)
        numbers = (numbers.to(tl.float32) * scales[:, None]).to(dtype)
    return numbers


@triton.jit
def multiply_keys(query, keys, is_loaded, front, sizes: tl.constexpr):
    """Return the products of queries and keys, [rows, keys]. `front` is that of the keys."""
    product = tl.dot(query.front, tl.trans(front), input_precision="ieee")
    if sizes.padded_rest_dim > 0:
        rest_dim: tl.constexpr = sizes.head_dim - sizes.value_dim
        rest = load_slots(
            keys,
            is_loaded,
            sizes.value_dim,
            rest_dim,
            sizes.padded_rest_dim,
            query.rest.dtype,
            sizes,
        )
        product = tl.dot(query.rest, tl.trans(rest), product, input_precision="ieee")
    return product


@triton.jit
def attend_segment(segment, query, tile, batch, cache, scores, sizes: tl.constexpr):
    """Return the sums of a tile over the keys of a segment."""
    sums = no_sums(sizes.num_rows, sizes.padded_value_dim)
    seen_from = first_seen(tile.positions, scores)
    dtype: tl.constexpr = query.front.dtype
    first = tl.maximum(segment * sizes.segment_keys, tile.start // sizes.num_keys * sizes.num_keys)
    end = tl.minimum((segment + 1) * sizes.segment_keys, tile.end)
    for start in range(first, end, sizes.num_keys):
        keys = start + tl.arange(0, sizes.num_keys)
        is_loaded = (keys >= tile.start) & (keys < tile.end)
        slots = find_slots(tile, keys, is_loaded, batch, cache, sizes)
        front = load_slots(
            slots + cache.key_place,
            is_loaded,
            0,
            sizes.value_dim,
            sizes.padded_value_dim,
            dtype,
            sizes,
        )
        value = front
        if not sizes.is_latent:
            value = load_slots(
                slots + cache.value_place,
                is_loaded,
                0,
                sizes.value_dim,
                sizes.padded_value_dim,
                dtype,
                sizes,
            )
        product = multiply_keys(query, slots + cache.key_place, is_loaded, front, sizes)
        scored = hide_unseen(score(product, scores, sizes), keys, tile, seen_from)
        sums = add_piece(sums, scored, value)
    return sums


@triton.jit
def store_output(dst, sums, tile, first, num_columns: tl.constexpr, sizes: tl.constexpr):
    """Divide the weighted values from column `first` on by the weights, and store them."""
    columns = first + tl.arange(0, num_columns)
    is_inside = tile.is_row[:, None] & (columns < sizes.value_dim)[None, :]
    rows = dst + tile.query_rows * sizes.value_dim
    output = sums.output / sums.total[:, None]
    tl.store(rows[:, None] + columns[None, :], output, mask=is_inside)


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride"],
    do_not_specialize_on_alignment=[
        "sinks",
        "block_table",
        "query_starts",
        "context_lens",
        "seen_ends",
    ],
)
def attention_kernel(
    dst,
    queries,
    sinks,
    block_table,
    query_starts,
    context_lens,
    num_sequences,
    table_stride,
    seen_ends,
    cache,
    scores,
    sizes: tl.constexpr,
):
    """Attention of a tile over all of its keys."""
    batch = Batch(block_table, query_starts, context_lens, num_sequences, table_stride, seen_ends)
    tile = locate_tile(batch, scores, sizes)
    query = load_query(queries, tile, sizes)
    sums = first_sums(sinks, tile, sizes, sizes.padded_value_dim)
    segment_keys: tl.constexpr = sizes.segment_keys
    for segment in range(tile.start // segment_keys, tl.cdiv(tile.end, segment_keys)):
        added = attend_segment(segment, query, tile, batch, cache, scores, sizes)
        sums = merge_sums(sums, added)
    store_output(dst, sums, tile, 0, sizes.padded_value_dim, sizes)


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride", "num_segments", "program_segments"],
    do_not_specialize_on_alignment=["block_table", "query_starts", "context_lens", "seen_ends"],
)
def segments_kernel(
    queries,
    partials,
    num_segments,
    program_segments,
    block_table,
    query_starts,
    context_lens,
    num_sequences,
    table_stride,
    seen_ends,
    cache,
    scores,
    sizes: tl.constexpr,
):
    """Sums of a tile over each of the program's segments."""
    batch = Batch(block_table, query_starts, context_lens, num_sequences, table_stride, seen_ends)
    tile = locate_tile(batch, scores, sizes)
    query = load_query(queries, tile, sizes)
    segment_keys: tl.constexpr = sizes.segment_keys
    first = tile.start // segment_keys
    begin = first + tl.program_id(2) * program_segments
    end = tl.minimum(begin + program_segments, tl.cdiv(tile.end, segment_keys))
    for segment in range(begin, end):
        sums = attend_segment(segment, query, tile, batch, cache, scores, sizes)
        places = tile.query_rows * num_segments + segment - first
        rows = partials.outputs + places * sizes.value_dim
        store_rows(rows, sums.output, tile.is_row, sizes.value_dim, sizes.padded_value_dim)
        tl.store(partials.sums + 2 * places, sums.highest, mask=tile.is_row)
        tl.store(partials.sums + 2 * places + 1, sums.total, mask=tile.is_row)


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride", "num_segments"],
    do_not_specialize_on_alignment=[
        "sinks",
        "block_table",
        "query_starts",
        "context_lens",
        "seen_ends",
    ],
)
def merge_kernel(
    dst,
    sinks,
    partials,
    num_segments,
    block_table,
    query_starts,
    context_lens,
    num_sequences,
    table_stride,
    seen_ends,
    scores,
    num_columns: tl.constexpr,
    sizes: tl.constexpr,
):
    """Attention of a tile, some columns of it, from the sums over its segments."""
    batch = Batch(block_table, query_starts, context_lens, num_sequences, table_stride, seen_ends)
    tile = locate_tile(batch, scores, sizes)
    first_column = tl.program_id(2) * num_columns
    columns = first_column + tl.arange(0, num_columns)
    is_inside = tile.is_row[:, None] & (columns < sizes.value_dim)[None, :]
    sums = first_sums(sinks, tile, sizes, num_columns)
    segment_keys: tl.constexpr = sizes.segment_keys
    num_own = tl.cdiv(tile.end, segment_keys) - tile.start // segment_keys
    for segment in tl.range(num_own, loop_unroll_factor=2):
        places = tile.query_rows * num_segments + segment
        outputs = (partials.outputs + places * sizes.value_dim)[:, None] + columns[None, :]
        added = Sums(
            tl.load(partials.sums + 2 * places, mask=tile.is_row, other=0.0),
            tl.load(partials.sums + 2 * places + 1, mask=tile.is_row, other=0.0),
            tl.load(outputs, mask=is_inside, other=0.0),
        )
        sums = merge_sums(sums, added)
    store_output(dst, sums, tile, first_column, num_columns, sizes)
