"""Base of what a backing tier stores blocks in: files, or objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from baton.core.errors import InvalidConfig
from baton.core.ids import BlockName
from baton.core.kv_hints import NO_HINTS, BlockHints
from baton.kv_transfer.tiers.eviction import EvictionOrder
from baton.kv_transfer.tiers.kv_access import BlockMemory
from baton.kv_transfer.tiers.stores.stored_blocks import HEADER_BYTES, REMOVED, block_of


class BlockUnusable(OSError):
    """One block cannot be read or written, which says nothing about others."""


class BlockStore(ABC):
    """Blocks by name, which outlive the process and may be shared with others.

    One thread uses it, except for `holds`, and for `read` and `write` where several blocks are read
    or written at a time. What fails raises OSError: BlockUnusable if the store works otherwise.
    """

    def __init__(
        self,
        size_option: str,
        block_bytes: int,
        max_bytes: int,
        tenant_share: float,
        clock: Callable[[], float],
    ) -> None:
        """`size_option` sets `max_bytes`. Raises InvalidConfig if that is less than a block."""
        self._block_bytes = block_bytes
        self.stored_bytes = block_bytes + HEADER_BYTES  # of each block
        max_blocks = max_bytes // self.stored_bytes
        if not max_blocks:
            raise InvalidConfig(
                f"{size_option} is {max_bytes} bytes; a block takes {self.stored_bytes}"
            )
        self._clock = clock
        self.order = EvictionOrder(max_blocks, tenant_share)
        self._lock = Lock()  # of the order, where several threads read and write

    def holds(self, name: BlockName) -> bool:
        return name in self.order

    def hints_of(self, name: BlockName) -> BlockHints:
        """Return hints that give a copy of the block in another tier the same place."""
        with self._lock:
            return self.order.hints_of(name, self._clock())

    @abstractmethod
    def scan(self) -> bool:
        """Look for stored blocks. Returns whether all are found; if not, call it again."""

    @abstractmethod
    def refresh(self) -> None:
        """Learn what other processes have stored and removed since the last call."""

    @abstractmethod
    def read(self, name: BlockName, memory: BlockMemory, block: int) -> bytes | None:
        """Read a block and return its digest; None if there is no valid one."""

    @abstractmethod
    def write(
        self,
        name: BlockName,
        memory: BlockMemory,
        block: int,
        digest: bytes,
        hints: BlockHints = NO_HINTS,
    ) -> None: ...

    @abstractmethod
    def use(self, names: Iterable[BlockName], hints: BlockHints) -> None:
        """Note the use of those of the blocks that are here, and apply the hints of the request."""

    @abstractmethod
    def remove(self, name: BlockName) -> None:
        """Remove a block, also one that is not known here, whichever tenant it is stored for."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all blocks, of other processes too."""

    @abstractmethod
    def close(self) -> None: ...

    def _apply_change(self, sign: str, stem: str) -> None:
        """Apply a change by another process."""
        with suppress(ValueError), self._lock:  # a stem that is not ours
            name, tenant = block_of(stem)
            if sign == REMOVED:
                self.order.remove(name)
            elif name not in self.order:
                self.order.add(name, BlockHints(tenant), self._clock())

    def _remove_damaged(self, name: BlockName) -> None:
        try:
            self.remove(name)
        except OSError:  # it may be read-only
            self._forget(name)

    def _forget(self, name: BlockName) -> None:
        with self._lock:
            self.order.remove(name)

    def _forget_all(self) -> None:
        with self._lock:
            for name in self.order.names:
                self.order.remove(name)


@dataclass(frozen=True, slots=True)
class StoreKind:
    """Kind of store, and the settings of a tier that has one."""

    name: str  # of the tier
    # Gets the place, the fingerprint, bytes of a block, the limit in bytes, the share of a tenant.
    open: Callable[[str, str, int, int, float], BlockStore]
    check: Callable[[str], object]  # raises InvalidConfig for a place that cannot work
    remedy: str  # where a place does not work
    bytes_per_s: float  # first guess of the speed of loads
    refresh_s: float  # interval at which the blocks of other processes are found
    num_parallel: int = 1  # blocks that are read or written at a time
    # With so many blocks waiting to be written, as a share of host memory, further ones are
    # skipped. None: the KV cache keeps them until there is room in host memory.
    max_waiting_share: float | None = None
