"""The border between a backing tier and what it stores blocks in, such as files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from baton.core.ids import BlockName
from baton.core.kv_hints import NO_HINTS, SHARED, BlockHints, Tenant
from baton.kv_transfer.tiers.block_memory import BlockMemory
from baton.kv_transfer.tiers.eviction import EvictionOrder

_NAMESPACE_BYTES = 16


class BlockStore(Protocol):
    """Blocks by name, which outlive the process and may be shared with others.

    One thread uses it, except for `holds`, and for `read` and `write` where several blocks are read
    or written at a time. What fails raises OSError.
    """

    @property
    def order(self) -> EvictionOrder: ...

    @property
    def num_evicted(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def max_bytes(self) -> int: ...

    def holds(self, name: BlockName) -> bool: ...

    def hints_of(self, name: BlockName) -> BlockHints:
        """Return hints that give a copy of the block in another tier the same place."""
        ...

    def scan(self) -> bool:
        """Look for stored blocks. Returns whether all are found; if not, call it again."""
        ...

    def refresh(self) -> None:
        """Learn what other processes have stored and removed."""
        ...

    def read(self, name: BlockName, memory: BlockMemory, block: int) -> bytes | None:
        """Read a block and return its digest; None if there is no valid one."""
        ...

    def write(
        self,
        name: BlockName,
        memory: BlockMemory,
        block: int,
        digest: bytes,
        hints: BlockHints = NO_HINTS,
    ) -> None: ...

    def use(self, names: Iterable[BlockName], hints: BlockHints) -> None:
        """Note the use of those of the blocks that are here, and apply the hints of the request."""
        ...

    def remove(self, name: BlockName) -> None: ...

    def clear(self) -> None:
        """Remove all blocks, of other processes too."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BackingConfig:
    """Settings of one tier behind host memory."""

    name: str
    block_s: float  # first guess of the time to load a block
    refresh_s: float  # interval at which the blocks of other processes are found
    num_parallel: int = 1  # blocks that are read or written at a time
    # With more blocks than this waiting to be written, further ones are skipped. None: the KV cache
    # keeps them until there is room in host memory.
    max_waiting_writes: int | None = None


def namespace_of(fingerprint: str) -> str:
    """Return a name for the blocks of one model and layout, the same on all hosts."""
    return blake2b(fingerprint.encode(), digest_size=_NAMESPACE_BYTES).hexdigest()


def stem_of(name: BlockName, tenant: Tenant) -> str:
    """Return the text by which a stored block is found."""
    return name.hex() if tenant == SHARED else f"{name.hex()}-{tenant.hex()}"


def block_of(stem: str) -> tuple[BlockName, Tenant]:
    """Return name and tenant of a stored block. Raises ValueError."""
    name, _, tenant = stem.partition("-")
    return bytes.fromhex(name), Tenant(bytes.fromhex(tenant))
