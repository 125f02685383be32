"""Access of tiers to a KV cache in memory of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

from baton.kv_transfer.fence import Fence
from baton.kv_transfer.tiers.kv_access import BlockMemory, DeviceBlocks, ReadTarget

PIECE_BYTES = 1 << 20  # at least a block: it is digested while the next ones are copied


class DeviceKvAccess:
    """Implements KvAccess. Digests are those of the copies in host memory, which is pinned.

    Files and objects are read into staging blocks, of which there is one for each parallel read.
    """

    def __init__(self, device: DeviceBlocks, staging: BlockMemory) -> None:
        self.num_blocks, self.block_bytes = device.num_blocks, device.block_bytes
        self._device = device
        self._staging = staging
        self._free: SimpleQueue[int] = SimpleQueue()
        for block in range(staging.num_blocks):
            self._free.put(block)

    def record(self) -> Fence:
        return self._device.record()

    def store(
        self, block_ids: Sequence[int], target: BlockMemory, into: Sequence[int]
    ) -> list[bytes]:
        size = max(1, PIECE_BYTES // self.block_bytes)
        copies: list[tuple[Fence, Sequence[int]]] = []
        digests: list[bytes] = []
        with self._landing():
            for first in range(0, len(block_ids), size):
                places = into[first : first + size]
                fence = self._device.copy_out(block_ids[first : first + size], target, places)
                copies.append((fence, places))
            for fence, places in copies:
                fence.wait()
                digests += map(target.digest, places)
        return digests

    def load(
        self, source: BlockMemory, blocks: Sequence[int], block_ids: Sequence[int]
    ) -> list[bytes]:
        with self._landing():
            fence = self._device.copy_in(source, blocks, block_ids)
            digests = [source.digest(block) for block in blocks]  # meanwhile
            fence.wait()
        return digests

    @contextmanager
    def reading(self, block_id: int) -> Iterator[ReadTarget]:
        block = self._free.get()
        try:
            yield ReadTarget(self._staging, block)
        finally:
            self._free.put(block)

    def fill(self, block_id: int, target: ReadTarget) -> None:
        with self._landing():
            self._device.copy_in(target.memory, [target.block], [block_id]).wait()

    def close(self) -> None:
        self._device.close()

    @contextmanager
    def _landing(self) -> Iterator[None]:
        """Wait for all copies after an exception: their blocks are given to others then."""
        try:
            yield
        except BaseException:
            self._device.drain()
            raise
