"""Blocks that fills, stores, sends and receives hold, independently of any request.

A request can end while a peer still writes its blocks, or while a tier still copies them. So
whatever accesses blocks has its own reference on each of them, until its end is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from baton.core.ids import BlockId
from baton.engine.kv_cache.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class Hold:
    """One reference on each of these blocks."""

    block_ids: list[BlockId] = field(default_factory=list)


class Holds:
    """Table of all holds."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._open: set[Hold] = set()

    def open(self, block_ids: Iterable[BlockId] = ()) -> Hold:
        hold = Hold()
        self._open.add(hold)
        self.add(hold, block_ids)
        return hold

    def adopt(self, block_ids: Iterable[BlockId]) -> Hold:
        """Open a hold with references that the caller has."""
        hold = self.open()
        hold.block_ids += block_ids
        return hold

    def add(self, hold: Hold, block_ids: Iterable[BlockId]) -> None:
        added = list(block_ids)
        self._pool.hold(added)
        hold.block_ids += added

    def close(self, hold: Hold) -> None:
        """Release the blocks. Those that are cached are evicted from the last one on."""
        self._open.remove(hold)
        self._pool.release(hold.block_ids)

    def block_ids(self) -> Iterator[BlockId]:
        """Yield each block, once per hold."""
        for hold in self._open:
            yield from hold.block_ids
