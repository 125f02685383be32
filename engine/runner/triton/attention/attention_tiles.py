"""Triton functions that find a program's tile: tokens of a sequence and heads of a KV head.

A row of the tile is one token with one query head. Keys of a tile are read in segments, and a
segment in pieces. Both begin at multiples of their size in the sequence.
"""

# Triton reads the annotations, which must not be strings.

from typing import Any, NamedTuple

import triton
import triton.language as tl


class AttentionTile(NamedTuple):
    """Rows of a program, and the keys that they attend to."""

    sequence: Any
    kv_head: Any
    heads: Any  # by row
    query_rows: Any  # by row: index of the token and the head in the flat batch
    positions: Any  # by row: of the token in the sequence
    seen_ends: Any  # by row: end of the keys that it attends to
    is_row: Any  # by row
    start: Any  # first key that a row attends to
    end: Any  # end of the keys, or 0 if the tile is empty


@triton.jit
def first_tile(query_starts, sequence, tile_tokens: tl.constexpr):
    """Return the first tile of a sequence, so that all of its tokens fit before the next one's.

    Without a remainder, as for single tokens, no tile is empty.
    """
    query_start = tl.load(query_starts + sequence).to(tl.int32)
    return (query_start + sequence * (tile_tokens - 1)) // tile_tokens


@triton.jit
def find_sequence(query_starts, tile, num_sequences, tile_tokens: tl.constexpr):
    """Return the sequence of a tile: the last one whose first tile is not after it."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if first_tile(query_starts, middle, tile_tokens) <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def find_token(query_starts, token, num_sequences, num_single):
    """Return the sequence of a token. Those at the front have one token each."""
    sequence = token
    if token >= num_single:
        sequence = find_sequence(query_starts, token, num_sequences, 1)
    return sequence


@triton.jit
def first_seen(position, scores):
    """Return the first position that a token at this position attends to."""
    in_window = tl.maximum(position - scores.window + 1, 0)
    return tl.maximum(in_window, position // scores.chunk * scores.chunk)


@triton.jit
def locate_tile(batch, scores, sizes: tl.constexpr):
    """Return the program's tile.

    The last tile of a KV head has fewer heads if a group is no multiple of a tile.
    """
    tile_tokens: tl.constexpr = sizes.num_rows // sizes.tile_heads
    head_tiles: tl.constexpr = (sizes.gqa_group_size + sizes.tile_heads - 1) // sizes.tile_heads
    tile = tl.program_id(0)
    sequence = find_sequence(batch.query_starts, tile, batch.num_sequences, tile_tokens)
    query_start = tl.load(batch.query_starts + sequence).to(tl.int32)
    num_queries = tl.load(batch.query_starts + sequence + 1).to(tl.int32) - query_start
    first_token = (tile - first_tile(batch.query_starts, sequence, tile_tokens)) * tile_tokens
    end_token = tl.minimum(first_token + tile_tokens, num_queries)
    num_computed = tl.load(batch.context_lens + sequence).to(tl.int32) - num_queries
    kv_head = tl.program_id(1) // head_tiles
    rows = tl.arange(0, sizes.num_rows)
    tokens = first_token + rows // sizes.tile_heads
    group_heads = tl.program_id(1) % head_tiles * sizes.tile_heads + rows % sizes.tile_heads
    heads = kv_head * sizes.gqa_group_size + group_heads
    num_heads = sizes.num_kv_heads * sizes.gqa_group_size
    is_row = (tokens < end_token) & (group_heads < sizes.gqa_group_size)
    seen_ends = num_computed + tokens + 1
    end = num_computed + end_token
    if sizes.has_seen_ends:
        # Those of the rows behind the last token are not read.
        seen_ends = tl.load(batch.seen_ends + query_start + tokens, mask=is_row, other=0)
        end = tl.max(seen_ends, axis=0)
    return AttentionTile(
        sequence,
        kv_head,
        heads,
        (query_start + tokens).to(tl.int64) * num_heads + heads,
        num_computed + tokens,
        seen_ends,
        is_row,
        first_seen(num_computed + first_token, scores),
        tl.where(first_token < num_queries, end, 0),
    )
