"""Split of attention over the context: which passes are split, and into how many programs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.runner.triton.attention.context_split import (
    MAX_SCRATCH_BYTES,
    NUM_ROWS,
    SEGMENT_KEYS,
    ContextSplit,
    count_segments,
    count_tiles,
    round_context,
    split_context,
)

PROCESSORS = 132
SCRATCH = 32 * 130  # numbers per segment of a token with 32 heads of 128


def test_a_single_long_decode_is_shared_by_several_programs() -> None:
    # 8 KV heads: 8 tiles.
    assert split_context(8, 8, SCRATCH, PROCESSORS) == ContextSplit(8, program_segments=1)
    assert split_context(8, 512, SCRATCH, PROCESSORS) == ContextSplit(512, program_segments=8)


def test_enough_tiles_or_a_short_context_are_not_split() -> None:
    assert split_context(PROCESSORS, 8, SCRATCH, PROCESSORS) is None
    assert split_context(8, 1, SCRATCH, PROCESSORS) is None


def test_sums_that_would_take_too_much_memory_are_not_split() -> None:
    most = MAX_SCRATCH_BYTES // 4 // 64

    assert split_context(8, 64, most, PROCESSORS) is not None
    assert split_context(8, 64, most + 1, PROCESSORS) is None


@given(
    num_tiles=st.integers(1, 131), num_segments=st.integers(2, 4096), processors=st.integers(1, 200)
)
def test_programs_have_all_segments_and_none_is_idle(
    num_tiles: int, num_segments: int, processors: int
) -> None:
    split = split_context(num_tiles, num_segments, 1, processors)

    if split is not None:
        covered = split.num_programs * split.program_segments
        assert num_segments <= covered < num_segments + split.program_segments


@pytest.mark.parametrize(
    ("longest", "rounded"), [(0, 1), (1, 1), (2, 2), (3, 4), (2048, 2048), (2049, 4096)]
)
def test_the_longest_context_is_rounded_up_to_a_power_of_two(longest: int, rounded: int) -> None:
    assert round_context(longest) == rounded


@given(
    position=st.integers(0, 5000),
    queries=st.integers(1, 16),
    window=st.none() | st.integers(1, 3000),
    chunk=st.none() | st.integers(1, 3000),
)
def test_no_tile_attends_to_more_segments_than_are_counted(
    position: int, queries: int, window: int | None, chunk: int | None
) -> None:
    start = 0 if window is None else max(position - window + 1, 0)
    start = start if chunk is None else max(start, position // chunk * chunk)
    end = position + queries

    counted = count_segments(round_context(end), window, chunk, tile_tokens=queries)

    assert -(-end // SEGMENT_KEYS) - start // SEGMENT_KEYS <= counted


def test_short_windows_need_few_segments() -> None:
    assert count_segments(1 << 17, SEGMENT_KEYS, None, tile_tokens=1) == 2
    assert count_segments(1 << 17, None, SEGMENT_KEYS, tile_tokens=1) == 2
    assert count_segments(1 << 17, None, None, tile_tokens=1) == (1 << 17) // SEGMENT_KEYS


@given(
    queries=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    tile_tokens=st.sampled_from([1, 2, 4, 5, NUM_ROWS]),
)
def test_each_sequence_has_its_tiles_before_those_of_the_next(
    queries: list[int], tile_tokens: int
) -> None:
    firsts = [
        (sum(queries[:sequence]) + sequence * (tile_tokens - 1)) // tile_tokens
        for sequence in range(len(queries))
    ]
    ends = [*firsts[1:], count_tiles(sum(queries), len(queries), tile_tokens)]

    for num_queries, first, end in zip(queries, firsts, ends, strict=True):
        assert (end - first) * tile_tokens >= num_queries


def test_decodes_have_no_empty_tiles() -> None:
    for tile_tokens in (1, 4, NUM_ROWS):
        assert count_tiles(7, 7, tile_tokens) == 7
