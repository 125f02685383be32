"""The border between a backing tier and what it stores blocks in, such as files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from baton.core.ids import BlockName
from baton.core.kv_hints import NO_HINTS, BlockHints
from baton.kv_transfer.tiers.block_memory import BlockMemory
from baton.kv_transfer.tiers.eviction import EvictionOrder


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
