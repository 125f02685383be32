"""Per-hand-off transfer records (sizes, times, outcome) for telemetry."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

from kv_transfer.protocol.memory_runs import layer_bytes_range
from kv_transfer.transports.base import Write
from kv_transfer.types import HandoffId, NodeId

MAX_UNCOLLECTED_RECORDS = 10_000  # the oldest records are dropped if they are not collected


class TransferRole(Enum):
    SENT = "sent"
    RECEIVED = "received"


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One hand-off as seen by one node. Times are its monotonic seconds; None: not reached."""

    handoff_id: HandoffId
    role: TransferRole
    transport: str
    began_s: float  # first order of the scheduler
    peer: NodeId | None = None
    outcome: str = ""  # "done", or the reason why it ended
    num_blocks: int = 0
    num_bytes: int = 0
    num_writes: int = 0
    num_descriptors: int = 0  # runs of blocks that are contiguous on both sides
    first_post_s: float | None = None
    last_written_s: float | None = None
    computed_s: float | None = None  # end of prefill
    ended_s: float | None = None
    post_s: float = 0.0  # time inside the transport's `post`, on the engine thread
    num_bytes_written_early: int = 0  # written before the end of prefill

    @property
    def overlap(self) -> float:
        """Share of the bytes that were written before prefill ended."""
        return self.num_bytes_written_early / self.num_bytes if self.num_bytes else 0.0

    @property
    def gigabytes_per_s(self) -> float | None:
        """Throughput from the first post to the last completed write."""
        if self.first_post_s is None or self.last_written_s is None:
            return None
        duration_s = self.last_written_s - self.first_post_s
        return self.num_bytes / duration_s / 1e9 if duration_s > 0 else None


class TransferLedger:
    """Collects the transfer records of one KV worker."""

    def __init__(self, transport: str, block_bytes: int, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._clock = clock
        self._block_bytes = block_bytes
        self._open: dict[HandoffId, TransferRecord] = {}
        self._write_by_id: dict[int, tuple[HandoffId, int]] = {}
        self._closed: deque[TransferRecord] = deque(maxlen=MAX_UNCOLLECTED_RECORDS)

    def begin(self, handoff_id: HandoffId, role: TransferRole, num_blocks: int = 0) -> None:
        if handoff_id not in self._open:
            self._open[handoff_id] = TransferRecord(
                handoff_id, role, self._transport, self._clock(), num_blocks=num_blocks
            )

    def note_computed(self, handoff_id: HandoffId) -> None:
        record = self._open.get(handoff_id)
        if record is not None:
            self._open[handoff_id] = replace(record, computed_s=self._clock())

    @contextmanager
    def posting(self, handoff_id: HandoffId, write: Write, peer: NodeId | None) -> Iterator[None]:
        """Time the transport's `post`, which may do the whole write at once, and record it."""
        began_s = self._clock()
        yield
        self._posted(handoff_id, write, peer, began_s)

    def _posted(
        self, handoff_id: HandoffId, write: Write, peer: NodeId | None, began_s: float
    ) -> None:
        record = self._open.get(handoff_id)
        if record is None:
            return
        layers = write.layers
        num_bytes = len(write.sources) * len(layer_bytes_range(self._block_bytes, layers))
        is_last_part = layers is None or layers.end == layers.of
        self._write_by_id[write.write_id] = (handoff_id, num_bytes)
        self._open[handoff_id] = replace(
            record,
            peer=peer,
            num_blocks=record.num_blocks + is_last_part * len(write.sources),
            num_bytes=record.num_bytes + num_bytes,
            num_writes=record.num_writes + 1,
            num_descriptors=record.num_descriptors + _num_runs(write),
            first_post_s=began_s if record.first_post_s is None else record.first_post_s,
            post_s=record.post_s + self._clock() - began_s,
        )

    def written(self, write_id: int) -> None:
        handoff_id, num_bytes = self._write_by_id.pop(write_id, (None, 0))
        record = self._open.get(handoff_id) if handoff_id is not None else None
        if record is None:
            return
        early = num_bytes if record.computed_s is None else 0
        num_early = record.num_bytes_written_early + early
        self._open[record.handoff_id] = replace(
            record, last_written_s=self._clock(), num_bytes_written_early=num_early
        )

    def landed(self, handoff_id: HandoffId) -> None:
        record = self._open.get(handoff_id)
        if record is not None:
            num_bytes = record.num_blocks * self._block_bytes
            self._open[handoff_id] = replace(record, num_bytes=num_bytes)
            self.end(handoff_id, "done")

    def end(self, handoff_id: HandoffId, outcome: str) -> None:
        record = self._open.pop(handoff_id, None)
        if record is not None:
            self._closed.append(replace(record, outcome=outcome, ended_s=self._clock()))

    def take(self) -> tuple[TransferRecord, ...]:
        taken = tuple(self._closed)
        self._closed.clear()
        return taken


def _num_runs(write: Write) -> int:
    """Return the number of descriptors after merging blocks that are contiguous on both sides."""
    sources, targets = write.sources, write.targets
    if write.layers is not None:
        return len(sources)  # only whole blocks can be contiguous
    steps = zip(sources, sources[1:], targets, targets[1:], strict=False)
    return bool(sources) + sum((b - a, d - c) != (1, 1) for a, b, c, d in steps)
