"""Times copies of KV between a device and the pinned host memory that it is sent through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from mmap import mmap

from baton.core.ids import BlockId
from baton.engine.runner.attention.kv_blocks import KvBlocks
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.layout import StagedRun
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.records import TransferRole
from baton.kv_transfer.transports.base import LayerRange

# Notes the bytes and seconds of a copy that is done: SENT out of the device, or RECEIVED into it.
NoteStaged = Callable[[TransferRole, int, float], None]


@dataclass(frozen=True, slots=True)
class StagedCopies:
    """Copies of a KV cache's blocks. Each is noted once the KV worker has seen its end.

    Its time thus is what the copy delays a hand-off by. Copies that are given up are not noted.
    """

    blocks: KvBlocks
    note: NoteStaged
    clock: Callable[[], float]

    def copy_out(
        self,
        target: Region,
        block_ids: Sequence[BlockId],
        layers: LayerRange,
        slots: Sequence[BlockId],
    ) -> Fence:
        num_bytes = len(block_ids) * len(layers.byte_range(target.block_bytes))
        began_s = self.clock()
        copied = self.blocks.copy_out(target, block_ids, layers, slots)
        return self._noted(copied, TransferRole.SENT, num_bytes, began_s)

    def convert(self, memory: mmap, staged: StagedRun) -> Fence:
        num_bytes = staged.num_blocks * staged.source.block_bytes
        began_s = self.clock()
        copied = self.blocks.convert(memory, staged)
        return self._noted(copied, TransferRole.RECEIVED, num_bytes, began_s)

    def _noted(self, copied: Fence, role: TransferRole, num_bytes: int, began_s: float) -> Fence:
        if not num_bytes:
            return copied
        return _NotedFence(copied, partial(self._note, role, num_bytes, began_s))

    def _note(self, role: TransferRole, num_bytes: int, began_s: float) -> None:
        self.note(role, num_bytes, self.clock() - began_s)


class _NotedFence:
    """Fence that calls a function when it is first seen to have passed, by one thread."""

    def __init__(self, fence: Fence, note: Callable[[], None]) -> None:
        self._fence = fence
        self._note: Callable[[], None] | None = note

    @property
    def is_passed(self) -> bool:
        if self._fence.is_passed:
            self._end()
            return True
        return False

    def wait(self) -> None:
        self._fence.wait()
        self._end()

    def _end(self) -> None:
        if self._note is not None:
            note, self._note = self._note, None
            note()
