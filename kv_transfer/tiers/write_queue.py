"""Blocks of host memory that wait to be written to a tier behind it."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from baton.core.fair_queue import FairQueue
from baton.core.ids import BlockName
from baton.core.kv_hints import BlockHints, Tenant
from baton.kv_transfer.tiers.host_tier import HostBlock


@dataclass(frozen=True, slots=True)
class QueuedWrite:
    name: BlockName
    block: HostBlock  # pinned until it is written
    hints: BlockHints
    generation: int
    ordered_s: float


class WriteQueue:
    """Tenants take turns. Thread-safe."""

    def __init__(self) -> None:
        self._queue = FairQueue[Tenant, QueuedWrite]()
        self._lock = Lock()

    def add(self, write: QueuedWrite) -> None:
        with self._lock:
            self._queue.add(write.block.tenant, write)

    def take(self, max_writes: int) -> list[QueuedWrite]:
        with self._lock:
            taken = (self._queue.take() for _ in range(max_writes))
            return [write for write in taken if write is not None]
