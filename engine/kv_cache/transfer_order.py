"""Order in which a hand-off transfers the blocks of all KV groups and of the recurrent state.

Both nodes derive it from the number of tokens alone: block after block of the sequence, and for
each the groups in turn, without the blocks that no token after the prompt attends to. The state
comes last. What the decode node lacks is always the rest of this order, so one number says where
a grant begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.ids import BlockId
from baton.engine.kv_cache.groups import KvCacheSpec
from baton.engine.kv_cache.held_kv import HeldKv


class TransferOrder:
    def __init__(self, specs: Sequence[KvCacheSpec], block_size: int) -> None:
        self._specs = tuple(specs)
        self._block_size = block_size
        self._forgets = any(spec.forgets for spec in specs)

    def index(self, held: HeldKv, num_blocks: int) -> int:
        """Return how many blocks precede those after the first `num_blocks` of each table."""
        return sum(max(0, num_blocks - first) for first in self._first_seen(held))

    def blocks(self, held: HeldKv, first: int, end: int) -> list[BlockId]:
        """Return the blocks of the places from `first` to `end` of each table, in order."""
        if len(self._specs) == 1 and not self._forgets:
            return held.block_tables[0][first:end]
        tables = list(zip(held.block_tables, self._first_seen(held), strict=True))
        return [
            table[place]
            for place in range(first, end)
            for table, first_seen in tables
            if place >= first_seen
        ]

    def num_whole_places(self, num_blocks: int) -> int:
        """Return how many places the first blocks of a transfer fill in all tables.

        With windows or chunks this is none: the blocks that tokens in between attend to are not
        transferred.
        """
        return 0 if self._forgets else num_blocks // len(self._specs)

    def _first_seen(self, held: HeldKv) -> list[int]:
        position = held.num_context_tokens
        return [spec.num_unseen(position) // self._block_size for spec in self._specs]
