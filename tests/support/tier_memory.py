"""Memory with blocks of random bytes, for tests of the tiers below the KV cache."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

from baton.kv_transfer.tiers.block_memory import BlockMemory
from baton.kv_transfer.tiers.host_tier import HostTier

BLOCK_BYTES = 4096


class OwnedMemory:
    """Blocks in memory that lives as long as this object."""

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        content = bytearray(random.Random(seed).randbytes(num_blocks * BLOCK_BYTES))
        self._buffer = (ctypes.c_char * len(content)).from_buffer(content)
        self.blocks = BlockMemory(ctypes.addressof(self._buffer), num_blocks, BLOCK_BYTES)

    def __getitem__(self, block: int) -> bytes:
        return bytes(self.blocks.view(block))

    def wipe(self, block: int) -> None:
        self.blocks.view(block)[:] = bytes(BLOCK_BYTES)


def host_tier(
    num_blocks: int, tenant_share: float = 1.0, clock: Callable[[], float] = lambda: 0.0
) -> HostTier:
    memory = OwnedMemory(num_blocks, seed=1)
    return HostTier(memory.blocks, memory, tenant_share, clock)


def name_of(number: int, group: int = 0) -> bytes:
    return number.to_bytes(16, "big") + (bytes((group,)) if group else b"")
