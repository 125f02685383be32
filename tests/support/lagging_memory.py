"""Memory of simulated nodes: blocks that each hold one number, written at once or later."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from baton.core.ids import BlockId
from baton.kv_transfer.fence import PASSED, Fence
from baton.kv_transfer.protocol.digest import AwaitHashes
from baton.kv_transfer.protocol.messages import Region

BLOCK_BYTES = 8


class Memory:
    """Blocks of a node. Each holds one number."""

    def __init__(self, num_blocks: int, block_bytes: int = BLOCK_BYTES) -> None:
        self._buffer = (ctypes.c_char * (num_blocks * block_bytes))()
        self.region = Region(ctypes.addressof(self._buffer), num_blocks, block_bytes)

    def get(self, block_id: BlockId) -> bytes:
        size = self.region.block_bytes
        return ctypes.string_at(self.region.base + block_id * size, size)

    def computed(self, block_id: BlockId) -> bytes:
        """Return the contents after all launched work has completed."""
        return self.get(block_id)

    def fence(self) -> Fence:
        return PASSED

    def drain(self) -> None:
        """Land all writes at once."""

    def put(self, block_id: BlockId, content: bytes) -> None:
        size = self.region.block_bytes
        ctypes.memmove(self.region.base + block_id * size, content, size)


class LaggingMemory(Memory):
    """Blocks on a device that computes asynchronously: writes land in order, and only when it is
    waited for or catches up.
    """

    def __init__(self, num_blocks: int, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__(num_blocks, block_bytes)
        self._launched: deque[tuple[BlockId, bytes]] = deque()
        self.num_landed = 0

    def put(self, block_id: BlockId, content: bytes) -> None:
        self._launched.append((block_id, content))

    def computed(self, block_id: BlockId) -> bytes:
        launched = dict(self._launched)
        return launched[block_id] if block_id in launched else self.get(block_id)

    def fence(self) -> Fence:
        return LaggingFence(self, self.num_landed + len(self._launched))

    def catch_up(self, num_writes: int | None = None) -> None:
        """Land this number of writes; by default all."""
        most = len(self._launched)
        for _ in range(most if num_writes is None else min(num_writes, most)):
            super().put(*self._launched.popleft())
            self.num_landed += 1

    def drain(self) -> None:
        self.catch_up()

    def hash(self, block_ids: Sequence[BlockId]) -> AwaitHashes:
        """Hash the blocks after the writes launched so far, which is later."""
        hashes = b"".join(xxhash.xxh3_64_digest(self.computed(block)) for block in block_ids)
        return lambda: hashes


@dataclass(frozen=True, slots=True)
class LaggingFence:
    memory: LaggingMemory
    num_writes: int  # that must have landed

    @property
    def is_passed(self) -> bool:
        return self.memory.num_landed >= self.num_writes

    def wait(self) -> None:
        self.memory.catch_up(max(0, self.num_writes - self.memory.num_landed))
