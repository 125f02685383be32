"""Blocks on a device that no data path reaches, and host memory that they pass through."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from baton.core.ids import BlockId, HandoffId
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.protocol.conversion import StagedBlocks, StagingArea
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import LayerRange
from tests.support.lagging_memory import BLOCK_BYTES, LaggingMemory, Memory

NUM_SLOTS, NUM_STAGED = 3, 6  # blocks of the host memory to send from, and to receive into


class StagedMemory(LaggingMemory):
    """Copies land in their order, next to the writes of passes, and read what is there then."""

    def __init__(self, num_blocks: int, *, lags: bool) -> None:
        super().__init__(num_blocks)
        self.region = replace(self.region, device="cuda:0")
        self.slots, self.staged = Memory(NUM_SLOTS), Memory(NUM_STAGED)
        area = Region(self.staged.region.base, 1, NUM_STAGED * BLOCK_BYTES)
        self.staging = StagingArea(area, self.convert)
        self._lags = lags
        self._copies: deque[Callable[[], object]] = deque()
        self.num_copied = 0
        self.witness: Callable[[HandoffId, BlockId], None] | None = None  # of copies that land

    def put(self, block_id: BlockId, content: bytes) -> None:
        super().put(block_id, content)
        if not self._lags:
            self.drain()

    @property
    def is_copying(self) -> bool:
        return bool(self._copies)

    def copy_out(
        self, block_ids: Sequence[BlockId], layers: LayerRange, slots: Sequence[BlockId]
    ) -> Fence:
        part = layers.byte_range(BLOCK_BYTES)
        for block, slot in zip(block_ids, slots, strict=True):
            to, source = self.slots.region, self.region
            self._begin(to.base + slot * BLOCK_BYTES, source.base + block * BLOCK_BYTES, part)
        return self._fence()

    def convert(self, staged: StagedBlocks) -> Fence:
        """Copy blocks that have arrived."""
        base, part = staged.conversion.region.base, range(BLOCK_BYTES)
        for slot, block in zip(staged.block_ids, staged.order.block_ids, strict=True):
            if self.witness is not None:
                self._copies.append(partial(self.witness, staged.order.handoff_id, block))
            self._begin(self.region.base + block * BLOCK_BYTES, base + slot * BLOCK_BYTES, part)
        return self._fence()

    def land_copies(self, number: int | None = None) -> None:
        """Land this number of copies; by default all."""
        most = len(self._copies)
        for _ in range(most if number is None else min(number, most)):
            self._copies.popleft()()
            self.num_copied += 1

    def _begin(self, to: int, source: int, part: range) -> None:
        copy = partial(ctypes.memmove, to + part.start, source + part.start, len(part))
        self._copies.append(copy)

    def _fence(self) -> Fence:
        return CopyFence(self, self.num_copied + len(self._copies))


@dataclass(frozen=True, slots=True)
class CopyFence:
    memory: StagedMemory
    num_copies: int  # that must have landed

    @property
    def is_passed(self) -> bool:
        return self.memory.num_copied >= self.num_copies

    def wait(self) -> None:
        self.memory.land_copies(max(0, self.num_copies - self.memory.num_copied))
