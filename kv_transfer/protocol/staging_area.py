"""Staging area of a receiver: memory for blocks of senders whose layout differs."""

from __future__ import annotations

from collections.abc import Callable

from baton.core.ids import BlockId, HandoffId
from baton.kv_transfer.protocol.conversion import Conversion, StagedBlocks
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.types import Receive

ConvertBlocks = Callable[[StagedBlocks], None]


class StagingArea:
    """Lends adjacent blocks to receives, first fit. A block is lent until no write can land."""

    def __init__(self, region: Region, convert: ConvertBlocks) -> None:
        self.region = region
        self.convert = convert
        self._lent: dict[HandoffId, tuple[range, StagedBlocks]] = {}  # bytes of the region

    def find(self, handoff_id: HandoffId) -> StagedBlocks | None:
        lent = self._lent.get(handoff_id)
        return None if lent is None else lent[1]

    def fits(self, conversion: Conversion, order: Receive) -> bool:
        """Return whether the whole area has room for an order."""
        return len(conversion.blocks_needed(order)) <= conversion.region.num_blocks

    def lend(self, conversion: Conversion, order: Receive) -> StagedBlocks | None:
        """Return blocks for an order, or None while the others leave no room."""
        needed, size = conversion.blocks_needed(order), conversion.region.block_bytes
        first = self._find_gap(len(needed), size)
        if first is None:
            return None
        block_ids = tuple(BlockId(block_id) for block_id in range(first, first + len(needed)))
        staged = StagedBlocks(conversion, order, needed.start, block_ids)
        taken = range(first * size, (first + len(needed)) * size)
        self._lent[order.handoff_id] = taken, staged
        return staged

    def take_back(self, handoff_id: HandoffId) -> bool:
        """Return whether the hand-off had blocks."""
        return self._lent.pop(handoff_id, None) is not None

    def _find_gap(self, num_blocks: int, size: int) -> int | None:
        """Return the first block of the first gap that is large enough."""
        first = 0
        for taken in sorted((taken for taken, _ in self._lent.values()), key=lambda it: it.start):
            if (first + num_blocks) * size <= taken.start:
                break
            first = max(first, -(-taken.stop // size))
        return first if (first + num_blocks) * size <= self.region.num_bytes else None
