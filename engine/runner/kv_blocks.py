"""Blocks of a runner's KV cache as the KV worker accesses them: read, hashed and converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from mmap import mmap
from typing import Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from baton.core.ids import BlockId
from baton.engine.runner.attention.kv_conversion import view_blocks, write_converted
from baton.engine.runner.device.device import Device
from baton.engine.runner.device.step_inputs import make_inputs
from baton.kv_transfer.protocol.conversion import StagedBlocks
from baton.kv_transfer.protocol.digest import AwaitHashes

READ_CHUNK_BLOCKS = 32


class BlockHashes(Protocol):
    """Kernels that hash KV blocks where they are."""

    def __call__(self, block_ids: Tensor) -> Tensor:
        """Launch the xxh3-64 hashes of these blocks. Returns their bits as int64."""
        ...


# Returns None if there are no kernels that can hash blocks of this cache.
MakeBlockHashes = Callable[[Tensor], BlockHashes | None]


def no_block_hashes(_: Tensor) -> BlockHashes | None:
    return None


class KvBlocks:
    def __init__(self, kv: Tensor, device: Device, hashes: BlockHashes | None = None) -> None:
        """Without `hashes`, blocks are copied to the host to be hashed."""
        self.kv = kv
        self._device = device
        self._hashes = hashes
        self._inputs = make_inputs(device)

    def read(self, block_ids: Sequence[BlockId]) -> Iterator[memoryview]:
        """Yield the bytes of these blocks in order, copied after all work launched so far."""
        for start in range(0, len(block_ids), READ_CHUNK_BLOCKS):
            ids = torch.tensor(block_ids[start : start + READ_CHUNK_BLOCKS])
            copied = self.kv[ids.to(self.kv.device)].flatten().view(torch.uint8).cpu()
            yield copied.numpy().data

    def hash(self, block_ids: Sequence[BlockId]) -> AwaitHashes:
        """Launch the hashes of these blocks after all work launched so far. See `HashBlocks`."""
        if self._hashes is None or not block_ids:
            hashes = b"".join(self._hash_copies(block_ids))
            return lambda: hashes
        self._inputs.begin()
        ids = self._inputs.put(np.array(block_ids, dtype=np.int64))
        self._inputs.send()
        host = self._device.pin(8 * len(block_ids)).view(torch.int64)
        host.copy_(self._hashes(ids), non_blocking=True)
        fence = self._device.record()

        def await_hashes() -> bytes:
            fence.wait()
            return host.numpy().astype(">i8").tobytes()

        return await_hashes

    def convert(self, memory: mmap, staged: StagedBlocks) -> None:
        """Convert blocks of a peer, in the staging area's memory, into those of an order."""
        conversion, block_ids = staged.conversion, staged.block_ids
        if block_ids:
            size = conversion.region.block_bytes
            first, count = block_ids[0] * size, len(block_ids) * size
            own = torch.frombuffer(memory, dtype=torch.uint8, offset=first, count=count)
            blocks = view_blocks(own, self.kv, conversion.source)
            skipped = conversion.num_skipped_tokens(staged.order)
            write_converted(blocks, self.kv, staged.order.block_ids, skipped)

    def _hash_copies(self, block_ids: Sequence[BlockId]) -> Iterator[bytes]:
        size = self.kv[0].numel() * self.kv.element_size()
        for copied in self.read(block_ids):
            for start in range(0, len(copied), size):
                yield xxhash.xxh3_64_digest(copied[start : start + size])
