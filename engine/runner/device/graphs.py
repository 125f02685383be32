"""Sizes of graphs, and the choice of one for a step. Pure.

A graph repeats launches with the same shapes. So a decode step is padded to a size for which one
was captured: rows, and blocks in the table of each. Everything else is launched as usual (eagerly).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

ROW_COUNTS = (1, 2, 4)  # and then multiples
ROW_STEP = 8
WIDE_ROW_STEP = 16  # from here on, a padding row costs little
WIDE_ROWS = 256
MAX_ROWS = 512
MIN_BLOCKS = 256  # of the smallest block table: the copy of a smaller one is as fast
BLOCKS_FACTOR = 4


class GraphSize(NamedTuple):
    num_rows: int
    num_blocks: int  # in the block table of a row
    has_adapters: bool = False  # rows can have some


class EagerCause(Enum):
    """Reason why a step cannot replay a graph."""

    NO_GRAPHS = "there are none"
    PROMPT = "it computes several tokens of a sequence, or samples not all of them"
    ALL_TOKENS = "an output head needs the hidden states of all tokens"
    ADAPTERS = "it has adapters, and these kernels' launches for them are in no graph"
    PICTURES = "tokens take encodings of pictures"
    SNAPSHOT = "it copies a recurrent state"
    RETRY = "it repeats a part of a failed pass"
    TOO_MANY_ROWS = "it has more rows than the largest graph"
    TOO_LONG = "a sequence has more blocks than the largest graph"


class StepShape(NamedTuple):
    """Properties of a step that decide whether a graph fits."""

    num_rows: int  # runs of tokens
    num_tokens: int
    num_sampled: int
    num_blocks: int  # of the longest sequence
    needs_all_tokens: bool = False
    has_adapters: bool = False
    has_snapshots: bool = False
    is_retry: bool = False
    has_pictures: bool = False


def graph_sizes(
    max_num_seqs: int, max_blocks: int, *, has_adapters: bool = False
) -> list[GraphSize]:
    """Return the sizes to capture, the largest first: the others fit into its memory.

    With adapters, there is each with and without: steps without adapters need no launches for them.
    """
    return [
        GraphSize(num_rows, num_blocks, with_adapters)
        for with_adapters in ([True, False] if has_adapters else [False])
        for num_rows in reversed(_row_counts(min(max_num_seqs, MAX_ROWS)))
        for num_blocks in reversed(_block_counts(max_blocks))
    ]


def choose_graph(step: StepShape, sizes: Sequence[GraphSize]) -> GraphSize | EagerCause:
    """Return the smallest size that holds the step, or the reason why none does."""
    if step.is_retry:
        return EagerCause.RETRY
    if step.has_snapshots:
        return EagerCause.SNAPSHOT
    if step.has_pictures:
        return EagerCause.PICTURES
    sizes = [size for size in sizes if size.has_adapters == step.has_adapters]
    if step.has_adapters and not sizes:
        return EagerCause.ADAPTERS
    if step.needs_all_tokens:
        return EagerCause.ALL_TOKENS
    if not step.num_rows == step.num_tokens == step.num_sampled:
        return EagerCause.PROMPT
    high_enough = [size for size in sizes if size.num_rows >= step.num_rows]
    if not high_enough:
        return EagerCause.TOO_MANY_ROWS
    fitting = [size for size in high_enough if size.num_blocks >= step.num_blocks]
    return min(fitting, default=EagerCause.TOO_LONG)


def _row_counts(max_rows: int) -> list[int]:
    counts = {
        *ROW_COUNTS,
        *range(ROW_STEP, WIDE_ROWS, ROW_STEP),
        *range(WIDE_ROWS, max_rows, WIDE_ROW_STEP),
    }
    return [*sorted(count for count in counts if count < max_rows), max_rows]


def _block_counts(max_blocks: int) -> list[int]:
    counts = []
    count = MIN_BLOCKS
    while count < max_blocks:
        counts.append(count)
        count *= BLOCKS_FACTOR
    return [*counts, max_blocks]
