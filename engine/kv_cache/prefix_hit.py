"""Result of a search for a cached prefix."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.ids import BlockId, existing_blocks


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks of a prefix. The request does not hold them yet."""

    num_blocks: int  # of tokens
    # By group: a table with an entry per block of tokens, or the snapshot of a recurrent state.
    blocks: tuple[list[BlockId], ...]
    num_shared_blocks: int = 0  # that all tables have, with or without a snapshot after them

    @property
    def block_ids(self) -> list[BlockId]:
        """The blocks of all groups."""
        return list(existing_blocks(self.blocks))
