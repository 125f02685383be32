"""Access to the blocks of a node's KV cache: by tiers, and to those in memory of a device."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from baton.kv_transfer.fence import PASSED, Fence

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Blocks of one size, side by side in memory that the CPU can read and write."""

    address: int
    num_blocks: int
    block_bytes: int

    def address_of(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} of {self.num_blocks}")
        return self.address + block * self.block_bytes

    def addresses_of(self, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        numbers = np.asarray(blocks, np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.num_blocks:
            raise IndexError(f"blocks {numbers.min()} to {numbers.max()} of {self.num_blocks}")
        return (self.address + numbers * self.block_bytes).astype(np.uint64)

    def view(self, block: int) -> memoryview:
        kind = ctypes.c_char * self.block_bytes
        return memoryview(kind.from_address(self.address_of(block))).cast("B")

    def digest(self, block: int) -> bytes:
        return xxh3_128_digest(self.view(block))


# Copies blocks from one memory into those of another, and returns the digests of the copies. Other
# Python threads run meanwhile.
CopyBlocks = Callable[[BlockMemory, Sequence[int], BlockMemory, Sequence[int]], list[bytes]]


def copy_block(source: BlockMemory, block: int, target: BlockMemory, into: int) -> None:
    """Copy a block. Other Python threads run meanwhile."""
    ctypes.memmove(target.address_of(into), source.address_of(block), source.block_bytes)


def copy_blocks(
    source: BlockMemory, blocks: Sequence[int], target: BlockMemory, into: Sequence[int]
) -> list[bytes]:
    """Implement CopyBlocks: digest each copy while it is in the CPU's cache."""
    digests = []
    for block, place in zip(blocks, into, strict=True):
        copy_block(source, block, target, place)
        digests.append(target.digest(place))
    return digests


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
