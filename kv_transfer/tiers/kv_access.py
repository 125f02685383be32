"""Access of tiers to the KV cache of a node, which is in memory of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from baton.kv_transfer.fence import PASSED, Fence
from baton.kv_transfer.tiers.block_memory import BlockMemory, CopyBlocks, copy_blocks


class ReadTarget(NamedTuple):
    """A block of memory that the CPU can access."""

    memory: BlockMemory
    block: int


class KvAccess(Protocol):
    """Copies between the blocks of the KV cache and host memory, with digests.

    Threads of tiers call the methods, except for `record`, once the fence of an order has passed. A
    method that returns or raises has no copy in progress.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def record(self) -> Fence:
        """Record a fence after the passes launched so far. Only the engine thread calls this."""
        ...

    def store(
        self, block_ids: Sequence[int], target: BlockMemory, into: Sequence[int]
    ) -> list[bytes]:
        """Copy blocks to host memory, and return the digests of the copies."""
        ...

    def load(
        self, source: BlockMemory, blocks: Sequence[int], block_ids: Sequence[int]
    ) -> list[bytes]:
        """Copy blocks from host memory, and return their digests."""
        ...

    def reading(self, block_id: int) -> AbstractContextManager[ReadTarget]:
        """Yield where to read a file or an object of this block, before `fill`."""
        ...

    def fill(self, block_id: int, target: ReadTarget) -> None:
        """Copy what was read into the block, unless it was read there."""
        ...

    def close(self) -> None:
        """Release what the copies need. No thread uses the blocks any more."""
        ...


class CpuKvAccess:
    """Implements KvAccess in memory that the CPU can access, which passes write before they end."""

    def __init__(self, memory: BlockMemory, copy: CopyBlocks = copy_blocks) -> None:
        self.num_blocks, self.block_bytes = memory.num_blocks, memory.block_bytes
        self._memory = memory
        self._copy = copy

    def record(self) -> Fence:
        return PASSED

    def store(
        self, block_ids: Sequence[int], target: BlockMemory, into: Sequence[int]
    ) -> list[bytes]:
        return self._copy(self._memory, block_ids, target, into)

    def load(
        self, source: BlockMemory, blocks: Sequence[int], block_ids: Sequence[int]
    ) -> list[bytes]:
        return self._copy(source, blocks, self._memory, block_ids)

    def reading(self, block_id: int) -> AbstractContextManager[ReadTarget]:
        return nullcontext(ReadTarget(self._memory, block_id))

    def fill(self, block_id: int, target: ReadTarget) -> None:
        """Do nothing: it was read there."""

    def close(self) -> None:
        """Do nothing: nothing is held."""
