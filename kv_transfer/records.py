"""Per-hand-off transfer records (sizes, times, outcome) for telemetry."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from baton.core.ids import HandoffId, NodeId
from baton.kv_transfer.protocol.conversion import StagedBlocks
from baton.kv_transfer.transports.base import Write
from baton.kv_transfer.types import Complete, KvOrders, Requested, Send, Withdraw

MAX_UNCOLLECTED_RECORDS = 10_000  # the oldest records are dropped if they are not collected


class TransferRole(Enum):
    """Role of the node in a hand-off, or in a pull, for which no prompt is computed."""

    SENT = "sent"
    RECEIVED = "received"
    GIVEN = "given"  # sent, of the prefix cache
    PULLED = "pulled"  # received, for the prefix cache


@dataclass(slots=True)
class TransferRecord:
    """One hand-off as seen by one node. Times are its monotonic seconds; None: not reached.

    The ledger updates a record until its hand-off has ended.
    """

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
    num_bytes_written_early: int = 0  # written before the end of prefill
    conversion: str = ""  # of the peer's blocks, on the receiver; on the sender, of its own

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
    def __init__(
        self,
        transport: str,
        block_bytes: int,
        clock: Callable[[], float],
        sent_conversion: str = "",  # of all blocks that are sent
    ) -> None:
        self._transport = transport
        self._sent_conversion = sent_conversion
        self._clock = clock
        self._block_bytes = block_bytes
        self._open: dict[HandoffId, TransferRecord] = {}
        self._closed: deque[TransferRecord] = deque(maxlen=MAX_UNCOLLECTED_RECORDS)

    def begin(self, orders: KvOrders) -> None:
        """Open a record for each hand-off that these orders name first."""
        for receive in orders.receives:
            role = TransferRole.PULLED if receive.names else TransferRole.RECEIVED
            self._begin(receive.handoff_id, role, len(receive.block_ids), receive.source.node_id)
        sends: tuple[Send | Complete | Withdraw, ...] = (
            *orders.sends,
            *orders.completes,
            *orders.layer_sends,
            *orders.withdraws,
        )
        for send in sends:
            self._begin(send.handoff_id, TransferRole.SENT)

    def begin_given(self, requested: Iterable[Requested]) -> None:
        """Open a record for each pull by a peer, before its orders."""
        for each in requested:
            self._begin(each.handoff_id, TransferRole.GIVEN)

    def _begin(
        self,
        handoff_id: HandoffId,
        role: TransferRole,
        num_blocks: int = 0,
        peer: NodeId | None = None,
    ) -> None:
        if handoff_id not in self._open:
            is_sent = role in (TransferRole.SENT, TransferRole.GIVEN)
            self._open[handoff_id] = TransferRecord(
                handoff_id,
                role,
                self._transport,
                self._clock(),
                peer,
                num_blocks=num_blocks,
                conversion=self._sent_conversion if is_sent else "",
            )

    def note_computed(self, handoff_id: HandoffId) -> None:
        self._open[handoff_id].computed_s = self._clock()

    def note_post(self, handoff_id: HandoffId, write: Write, peer: NodeId | None) -> None:
        """Record a write before it is posted: the transport may do all of it at once."""
        record = self._open.get(handoff_id)
        if record is None:
            return
        layer_bytes = len(write.layers.byte_range(self._block_bytes))
        record.peer = peer
        if write.layers.end == write.layers.of:
            record.num_blocks += len(write.sources)
        record.num_bytes += len(write.sources) * layer_bytes
        record.num_writes += 1
        record.num_descriptors += _num_runs(write)
        if record.first_post_s is None:
            record.first_post_s = self._clock()

    def written(self, handoff_id: HandoffId, num_bytes: int) -> None:
        record = self._open.get(handoff_id)
        if record is None:
            return
        record.last_written_s = self._clock()
        if record.computed_s is None:
            record.num_bytes_written_early += num_bytes

    def note_staged(self, handoff_id: HandoffId, staged: StagedBlocks) -> None:
        """Record that a receive consists of the peer's blocks, which are converted."""
        record = self._open.get(handoff_id)
        if record is not None:
            record.conversion = str(staged.conversion)
            record.num_blocks = len(staged.block_ids)
            record.num_bytes = record.num_blocks * staged.conversion.region.block_bytes

    def landed(self, handoff_id: HandoffId) -> None:
        record = self._open.get(handoff_id)
        if record is not None and not record.conversion:
            record.num_bytes = record.num_blocks * self._block_bytes
        self.end(handoff_id, "done")

    def end(self, handoff_id: HandoffId, outcome: str) -> None:
        record = self._open.pop(handoff_id, None)
        if record is not None:
            record.outcome, record.ended_s = outcome, self._clock()
            self._closed.append(record)

    def take(self) -> tuple[TransferRecord, ...]:
        taken = tuple(self._closed)
        self._closed.clear()
        return taken


def _num_runs(write: Write) -> int:
    """Return the number of descriptors after merging blocks that are contiguous on both sides."""
    sources, targets = write.sources, write.targets
    if not write.layers.is_whole:
        return len(sources)  # only whole blocks can be contiguous
    steps = zip(sources, sources[1:], targets, targets[1:], strict=False)
    return bool(sources) + sum((b - a, d - c) != (1, 1) for a, b, c, d in steps)
