"""Tokens of a pass: their rows, and their positions in the flat batch and in the KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from baton.engine.errors import PictureCut
from baton.engine.plan import PlanRow
from baton.engine.runner.model.token_counts import Ints as Ints
from baton.engine.runner.model.token_counts import TokenCounts
from baton.engine.structured_output.grammar import Bits


class TokenRun(NamedTuple):
    """Consecutive tokens of one row in the flat batch, and the inputs of sampling the next one."""

    row: PlanRow
    slot: int
    num_tokens: int
    end: int  # sequence length up to and including the last of them
    tokens: Ints  # all tokens of the slot
    allowed: Bits | None = None  # grammar mask
    counts: TokenCounts | None = None  # of the row's tokens, for penalties; None: not kept

    @property
    def known_tokens(self) -> Ints:
        """Prompt and outputs up to the end; their number is the position of the next token."""
        return self.tokens[: self.end]

    @property
    def positions(self) -> range:
        return range(self.end - self.num_tokens, self.end)


@dataclass(frozen=True, slots=True)
class PassLayout:
    """Flat batch of tokens, sequence after sequence. Arrays are by sequence unless noted.

    Sequences with one token come first, so that all decodes are contiguous.
    """

    num_queries: Ints  # tokens in this pass
    context_lens: Ints  # tokens with KV once this pass has written its own
    # [KV groups, sequences, blocks]; entries of blocks that no token attends to are undefined. The
    # number of blocks is the bound of context lengths on which the sizes of launches may depend.
    block_tables: Ints
    positions: Ints  # by token
    write_blocks: Ints  # [KV groups, tokens]: the block that a token's KV is written to
    write_offsets: Ints  # by token: the slot in that block
    # By token: the end of the tokens that it attends to, for pictures whose tokens attend to each
    # other. None: its own is the last one.
    seen_ends: Ints | None = None

    @property
    def num_single(self) -> int:
        """Number of sequences at the front that have exactly one token."""
        num_queries: list[int] = self.num_queries.tolist()
        return num_queries.count(1)

    @property
    def query_starts(self) -> Ints:
        """Flat index of each sequence's first token."""
        ends: Ints = self.num_queries.cumsum()
        return ends - self.num_queries

    def last_token_indices(self, sequences: Ints) -> Ints:
        """Return the flat indices of the last tokens of these sequences."""
        return self.query_starts[sequences] + self.num_queries[sequences] - 1

    def restrict_to_last_tokens(self, sequences: Ints) -> PassLayout:
        """Return the layout of a pass over only the last tokens of these sequences.

        It runs after the KV of all other tokens was written.
        """
        last = self.last_token_indices(sequences)
        return PassLayout(
            num_queries=np.ones_like(sequences),
            context_lens=self.context_lens[sequences],
            block_tables=self.block_tables[:, sequences],
            positions=self.positions[last],
            write_blocks=self.write_blocks[:, last],
            write_offsets=self.write_offsets[last],
            seen_ends=None if self.seen_ends is None else self.seen_ends[last],
        )

    def pad(self, num_rows: int, num_blocks: int, scratch_block: int) -> PassLayout:
        """Return this batch of single tokens with more rows, and block tables of `num_blocks`.

        An added row has one token, which is written into the scratch block and sees only itself.
        """
        num_groups, num_own, width = self.block_tables.shape
        num_added = num_rows - num_own
        tables = np.full((num_groups, num_rows, num_blocks), scratch_block, dtype=np.int64)
        tables[:, :num_own, :width] = self.block_tables
        blocks = np.full((num_groups, num_rows), scratch_block, dtype=np.int64)
        blocks[:, :num_own] = self.write_blocks
        return PassLayout(
            num_queries=np.ones(num_rows, dtype=np.int64),
            context_lens=_append(self.context_lens, num_added, 1),
            block_tables=tables,
            positions=_append(self.positions, num_added, 0),
            write_blocks=blocks,
            write_offsets=_append(self.write_offsets, num_added, 0),
        )


def empty_layout(num_groups: int) -> PassLayout:
    """Return the layout of no sequence."""
    nothing = np.zeros(0, dtype=np.int64)
    return PassLayout(
        num_queries=nothing,
        context_lens=nothing,
        block_tables=np.zeros((num_groups, 0, 0), dtype=np.int64),
        positions=nothing,
        write_blocks=np.zeros((num_groups, 0), dtype=np.int64),
        write_offsets=nothing,
    )


def picture_ends(runs: Sequence[TokenRun], positions: Ints) -> Ints | None:
    """Return the end of the tokens that each token sees; None if all see up to themselves.

    A token of a picture sees up to the picture's end, which must be in the same run.
    """
    ends: Ints | None = None
    first = 0
    for run in runs:
        start = run.end - run.num_tokens
        for segment in run.row.media:
            if segment.overlaps(start, run.end):
                end = segment.start + segment.num_tokens
                if segment.start < start or end > run.end:
                    raise PictureCut(
                        f"tokens {start} to {run.end} of {run.row.request_id} cut a picture that "
                        f"has tokens {segment.start} to {end}"
                    )
                ends = positions + 1 if ends is None else ends
                ends[first + segment.start - start : first + end - start] = end
        first += run.num_tokens
    return ends


def _append(numbers: Ints, count: int, number: int) -> Ints:
    return np.concatenate((numbers, np.full(count, number, dtype=np.int64)))
