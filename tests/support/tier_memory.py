"""Memory with blocks of random bytes, for tests of the tiers below the KV cache."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from mmap import mmap

from baton.kv_transfer.tiers.host_tier import HostTier
from baton.kv_transfer.tiers.kv_access import (
    BlockMemory,
    CopyBlocks,
    CpuKvAccess,
    KvAccess,
    copy_blocks,
)

BLOCK_BYTES = 4096


class OwnedMemory:
    """Blocks in memory that lives as long as this object."""

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        content = random.Random(seed).randbytes(num_blocks * BLOCK_BYTES)
        self.mapping = mmap(-1, len(content))
        self.mapping.write(content)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self.blocks = BlockMemory(address, num_blocks, BLOCK_BYTES)

    def __getitem__(self, block: int) -> bytes:
        return bytes(self.blocks.view(block))

    def write(self, block: int, content: bytes) -> None:
        self.blocks.view(block)[:] = content

    def wipe(self, block: int) -> None:
        self.write(block, bytes(BLOCK_BYTES))

    def kv_access(self, host: OwnedMemory, copy: CopyBlocks = copy_blocks) -> KvAccess:
        """Return the blocks as tiers use them, with host memory in that of `host`."""
        return CpuKvAccess(self.blocks, copy)

    def check(self) -> None:
        """Raise if a copy is still in progress, or memory is pinned: never on the CPU."""


def host_tier(
    num_blocks: int, tenant_share: float = 1.0, clock: Callable[[], float] = lambda: 0.0
) -> HostTier:
    return host_tier_in(OwnedMemory(num_blocks, seed=1), tenant_share, clock)


def host_tier_in(
    memory: OwnedMemory, tenant_share: float = 1.0, clock: Callable[[], float] = lambda: 0.0
) -> HostTier:
    return HostTier(memory.blocks, memory, tenant_share, clock)


def name_of(number: int, group: int = 0) -> bytes:
    return number.to_bytes(16, "big") + (bytes((group,)) if group else b"")
