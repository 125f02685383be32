"""Choice of a graph for a step: the smallest that holds it, or the reason why none does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.runner.device.graphs import (
    MAX_ROWS,
    EagerCause,
    GraphSize,
    StepShape,
    choose_graph,
    graph_sizes,
)

LIMITS = st.tuples(st.integers(1, 700), st.integers(1, 9000), st.booleans())


def decodes(num_rows: int, num_blocks: int = 1, **others: bool) -> StepShape:
    return StepShape(num_rows, num_rows, num_rows, num_blocks, **others)


@given(limits=LIMITS, draw=st.data())
def test_every_batch_of_decodes_has_the_smallest_graph_that_holds_it(
    limits: tuple[int, int, bool], draw: st.DataObject
) -> None:
    max_num_seqs, max_blocks, has_adapters = limits
    sizes = graph_sizes(max_num_seqs, max_blocks, has_adapters=has_adapters)
    uses_some = has_adapters and draw.draw(st.booleans())
    num_rows = draw.draw(st.integers(1, min(max_num_seqs, MAX_ROWS)))
    num_blocks = draw.draw(st.integers(1, max_blocks))

    size = choose_graph(decodes(num_rows, num_blocks, has_adapters=uses_some), sizes)

    assert isinstance(size, GraphSize)
    assert size in sizes
    assert size.has_adapters is uses_some
    assert size.num_rows >= num_rows
    assert size.num_blocks >= num_blocks
    for other in sizes:
        if other.num_rows >= num_rows and other.num_blocks >= num_blocks:
            assert other.num_rows >= size.num_rows
            assert other.num_rows > size.num_rows or other.num_blocks >= size.num_blocks


@given(limits=LIMITS)
def test_the_first_size_holds_all_others_and_none_exceeds_the_limits(
    limits: tuple[int, int, bool],
) -> None:
    max_num_seqs, max_blocks, has_adapters = limits

    sizes = graph_sizes(max_num_seqs, max_blocks, has_adapters=has_adapters)

    assert sizes[0] == (min(max_num_seqs, MAX_ROWS), max_blocks, has_adapters)
    assert len(set(sizes)) == len(sizes)
    for kind in (True, False):
        own = [size[:2] for size in sizes if size.has_adapters is kind]
        assert own == sorted(own, reverse=True)
    assert sizes == sorted(sizes, key=lambda size: size.has_adapters, reverse=True)
    assert all(size.num_rows <= max_num_seqs for size in sizes)
    assert all(size.num_blocks <= max_blocks for size in sizes)


@given(num_rows=st.integers(9, MAX_ROWS))
def test_at_most_half_of_the_rows_are_padding_and_fewer_in_large_batches(num_rows: int) -> None:
    size = choose_graph(decodes(num_rows), graph_sizes(MAX_ROWS, 1))

    assert isinstance(size, GraphSize)
    assert size.num_rows - num_rows < (8 if num_rows <= 248 else 16)


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (StepShape(3, 7, 3, 1), EagerCause.PROMPT),
        (StepShape(3, 3, 2, 1), EagerCause.PROMPT),
        (decodes(3, needs_all_tokens=True), EagerCause.ALL_TOKENS),
        (decodes(3, has_adapters=True), EagerCause.ADAPTERS),
        (decodes(3, has_snapshots=True), EagerCause.SNAPSHOT),
        (decodes(3, is_retry=True), EagerCause.RETRY),
        (decodes(17), EagerCause.TOO_MANY_ROWS),
        (decodes(3, num_blocks=41), EagerCause.TOO_LONG),
    ],
)
def test_other_steps_are_launched_eagerly(step: StepShape, cause: EagerCause) -> None:
    assert choose_graph(step, graph_sizes(16, 40)) is cause


def test_the_usual_sizes() -> None:
    rows = [size.num_rows for size in graph_sizes(40, 100)]
    blocks = [size.num_blocks for size in graph_sizes(1, 8192)]

    assert rows == [40, 32, 24, 16, 8, 4, 2, 1]
    assert blocks == [8192, 4096, 1024, 256]
