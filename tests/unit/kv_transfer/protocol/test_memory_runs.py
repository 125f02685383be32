"""Runs of contiguous memory, made from block ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import BlockId
from baton.kv_transfer.protocol.memory_runs import BlockRun, BlockRunPair, pair_spans, spans
from baton.kv_transfer.protocol.messages import Region

HERE, THERE = Region(1000, 16, 10), Region(5000, 16, 10)
IDS = st.lists(st.integers(0, 15).map(BlockId), max_size=12)


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def test_adjacent_blocks_are_merged_in_order() -> None:
    assert spans(HERE, ids(3, 4, 5, 1, 0)) == [
        BlockRun(1030, 30),
        BlockRun(1010, 10),
        BlockRun(1000, 10),
    ]


def test_a_pair_of_runs_extends_only_while_both_sides_are_contiguous() -> None:
    pairs = pair_spans(HERE, ids(0, 1, 2), THERE, ids(4, 5, 9))

    assert pairs == [BlockRunPair(1000, 5040, 20), BlockRunPair(1020, 5090, 10)]


@given(IDS)
def test_runs_cover_exactly_the_blocks(block_ids: list[BlockId]) -> None:
    covered = [
        address
        for span in spans(HERE, block_ids)
        for address in range(span.address, span.address + span.num_bytes)
    ]

    assert covered == [1000 + 10 * block + byte for block in block_ids for byte in range(10)]


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=12))
def test_paired_runs_copy_each_block_to_its_own_place(moves: list[tuple[int, int]]) -> None:
    pairs = pair_spans(HERE, ids(*(a for a, _ in moves)), THERE, ids(*(b for _, b in moves)))

    copied = [(p.source + i, p.target + i) for p in pairs for i in range(0, p.num_bytes, 10)]
    assert copied == [(1000 + 10 * a, 5000 + 10 * b) for a, b in moves]


def test_a_block_outside_the_region_is_refused() -> None:
    with pytest.raises(ValueError, match="block 16 is outside"):
        spans(HERE, ids(16))


def test_blocks_of_different_size_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 10 and 20 bytes"):
        pair_spans(HERE, ids(0), Region(5000, 16, 20), ids(0))
