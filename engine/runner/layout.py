"""Where the tokens of one pass lie, in the flat batch and in the KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PassLayout:
    """One flat batch of tokens, sequence after sequence; arrays are by sequence unless said.

    Sequences with one token lead, so that the decodes are one run of the batch.
    """

    num_queries: Ints  # tokens in this pass
    context_lens: Ints  # tokens with KV once this pass has written its own
    block_tables: Ints  # [sequences, blocks]; what lies past the context is not meaningful
    positions: Ints  # by token
    write_blocks: Ints  # by token: the block that takes its KV,
    write_offsets: Ints  # and the place in that block

    @property
    def num_single(self) -> int:
        """How many sequences at the front have exactly one token."""
        num_queries: list[int] = self.num_queries.tolist()
        return num_queries.count(1)

    @property
    def query_starts(self) -> Ints:
        """The place of each sequence's first token in the flat batch."""
        ends: Ints = self.num_queries.cumsum()
        return ends - self.num_queries

    def last_tokens(self, sequences: Ints) -> Ints:
        """Their places in the flat batch."""
        return self.query_starts[sequences] + self.num_queries[sequences] - 1

    def of_last_tokens(self, sequences: Ints) -> PassLayout:
        """A pass of these tokens alone, behind the one that has written all others."""
        last = self.last_tokens(sequences)
        return PassLayout(
            num_queries=np.ones_like(sequences),
            context_lens=self.context_lens[sequences],
            block_tables=self.block_tables[sequences],
            positions=self.positions[last],
            write_blocks=self.write_blocks[last],
            write_offsets=self.write_offsets[last],
        )
