"""Per-request accounting of computed, cached and received tokens on this node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.core.ids import HandoffId, RequestId
from baton.engine.plan import Plan, PlanRow
from baton.engine.step_observer import StepObserver, StepRecord
from baton.kv_transfer.records import TransferRecord, TransferRole
from baton.kv_transfer.types import NO_REPORTS


@dataclass(slots=True)
class Entry:
    """Counters of one request on this node, including recomputation after preemptions."""

    num_computed_prompt_tokens: int = 0  # by this node's model
    num_cached_prompt_tokens: int = 0  # prefix-cache hits at the first run
    num_received_blocks: int = 0  # KV blocks written by a peer
    num_received_bytes: int = 0
    kv_conversion: str = ""  # of the received blocks


class RequestLedger(StepObserver):
    """Accounting entries of the requests in flight.

    Entries are written on the engine's thread. An entry is up to date for each output that has
    been delivered. The id of a hand-off is the id of its request on this node, such as `a#1`.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called on the engine's thread when blocks are granted or freed."""
        self._entries: dict[RequestId, Entry] = {}
        self._on_change = on_change
        # Called there for each hand-off whose last write has completed; must not block.
        self.on_sent: Callable[[HandoffId], None] = lambda _: None

    @contextmanager
    def open_entry(self, request_id: RequestId) -> Iterator[Entry]:
        """Count for a request until the block ends."""
        entry = self._entries[request_id] = Entry()
        try:
            yield entry
        finally:
            del self._entries[request_id]

    def note_plan(self, plan: Plan, now_s: float) -> None:
        receives = plan.kv_orders.receives
        if receives or plan.started or plan.dropped:
            self._on_change()
        for receive in receives:
            entry = self._entries.get(RequestId(str(receive.handoff_id)))
            if entry is not None:
                entry.num_cached_prompt_tokens = receive.num_cached_tokens
        for row in plan.started:
            self._note_started(row)

    def note_end(self, step: StepRecord) -> None:
        for record in step.transfers:
            self._note_record(record)
        if step.reports != NO_REPORTS:
            self._on_change()
        for handoff_id in step.reports.finished_sending:
            self.on_sent(handoff_id)

    def _note_started(self, row: PlanRow) -> None:
        entry = self._entries.get(row.request_id)
        if entry is None:
            return
        num_known = min(row.num_prompt_tokens, row.num_computed_tokens)
        if entry.num_computed_prompt_tokens == 0 and entry.num_received_blocks == 0:
            entry.num_cached_prompt_tokens = num_known
        entry.num_computed_prompt_tokens += row.num_prompt_tokens - num_known

    def _note_record(self, record: TransferRecord) -> None:
        entry = self._entries.get(RequestId(str(record.handoff_id)))
        if entry is not None and record.role is TransferRole.RECEIVED and record.outcome == "done":
            entry.num_received_blocks += record.num_blocks
            entry.num_received_bytes += record.num_bytes
            entry.kv_conversion = record.conversion
