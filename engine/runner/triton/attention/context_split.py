"""Split of attention over the context, for few sequences with long contexts. Pure.

A program computes a tile: tokens of one sequence, with heads of one KV head. A few sequences have
too few tiles to occupy a GPU. Then several programs share a tile's segments of keys, each stores
the sums over its segments, and a second kernel merges them. Bits do not depend on it.

The choice depends on the numbers of tokens and sequences, and on the longest context, rounded up to
a power of two, so that a graph that was recorded for these numbers can be replayed.
"""

from __future__ import annotations

from typing import NamedTuple

NUM_ROWS = 16  # of a tile, tokens times query heads: the fewest that tensor cores multiply
SEGMENT_KEYS = 256
PROGRAMS_PER_PROCESSOR = 4  # that a split leads to, if there are enough segments
MAX_SCRATCH_BYTES = 256 << 20  # of sums over segments; with more, attention is not split
FLOAT_BYTES = 4
NUM_SUMS = 2  # of a row besides its values: the highest score, and the sum of the weights


class ContextSplit(NamedTuple):
    """Segments of a tile, and how many of them belong to one program."""

    num_segments: int
    program_segments: int

    @property
    def num_programs(self) -> int:
        """Return the programs of each tile."""
        return -(-self.num_segments // self.program_segments)


def round_context(longest: int) -> int:
    """Round the longest context of a pass up to a power of two."""
    return 1 << max(longest - 1, 0).bit_length()


def count_tiles(num_tokens: int, num_sequences: int, tile_tokens: int) -> int:
    """Return the most tiles of sequences with so many tokens. It is exact for single tokens."""
    return (num_tokens + num_sequences * (tile_tokens - 1)) // tile_tokens


def count_segments(context: int, window: int | None, chunk: int | None, tile_tokens: int) -> int:
    """Return the most segments with keys that a tile attends to, in contexts up to this length."""
    limits = [limit for limit in (window, chunk) if limit is not None]
    num_keys = min([context, *(limit + tile_tokens - 1 for limit in limits)])
    # Those of a window can begin anywhere in a segment.
    end = num_keys if num_keys == context else min(num_keys + SEGMENT_KEYS - 1, context)
    return -(-end // SEGMENT_KEYS)


def split_context(
    num_tiles: int, num_segments: int, scratch_numbers: int, num_processors: int
) -> ContextSplit | None:
    """Return how programs share the segments of a tile, or None if one program reads them all.

    `num_tiles` counts those of all heads, and `scratch_numbers` the sums over a segment of all
    tokens and heads.
    """
    scratch_bytes = FLOAT_BYTES * scratch_numbers * num_segments
    if num_tiles >= num_processors or num_segments < 2 or scratch_bytes > MAX_SCRATCH_BYTES:
        return None
    programs_per_tile = PROGRAMS_PER_PROCESSOR * num_processors // num_tiles
    return ContextSplit(num_segments, -(-num_segments // programs_per_tile))
