"""Access to blocks in memory by address, without copies of Python objects."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

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
