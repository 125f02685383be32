"""Blocks of a KV cache in the memory of a device that the CPU cannot access."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

from baton.kv_transfer.fence import Fence
from baton.kv_transfer.tiers.kv_access import BlockMemory


class DeviceBlocks(Protocol):
    """Copies between the KV cache and pinned host memory.

    They begin in the order of the calls, and run next to the passes without an order between the
    two. So a pass and a copy must not use a block at the same time: wait for a fence before the
    other begins. Any thread may call the methods.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def pin(self, memory: mmap.mmap) -> None:
        """Pin host memory until `close`. Raises InvalidConfig if the device cannot."""
        ...

    def record(self) -> Fence:
        """Record a fence after all passes launched so far."""
        ...

    def copy_out(self, block_ids: Sequence[int], target: BlockMemory, into: Sequence[int]) -> Fence:
        """Begin to copy blocks into pinned memory. They are there once the fence has passed."""
        ...

    def copy_in(
        self, source: BlockMemory, blocks: Sequence[int], block_ids: Sequence[int]
    ) -> Fence:
        """Begin to copy blocks from pinned memory. They are there once the fence has passed."""
        ...

    def drain(self) -> None:
        """Wait until no copy is in progress. An exception of a copy can leave others behind."""
        ...

    def close(self) -> None:
        """Wait for all copies, and release the pinned memory."""
        ...
