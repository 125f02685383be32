"""Per-request accounting of computed, cached and received tokens on this node.

The ledger wraps the engine's runner and KV worker and observes plans, orders and reports without
changing them. The engine and its workers do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.plan import Plan, Runner, RunResult
from engine.request import RequestId
from kv_transfer.records import TransferRecord, TransferRole
from kv_transfer.types import HandoffId, KvOrders, KvReports
from node.tracing import RecordingKvWorker

# Called on the engine's thread; must not block.
OnSent = Callable[[HandoffId], None]
OnChange = Callable[[], None]

NO_REPORTS = KvReports()


@dataclass(slots=True)
class Entry:
    """Counters of one request on this node, including recomputation after preemptions."""

    num_computed_prompt_tokens: int = 0  # by this node's model
    num_cached_prompt_tokens: int = 0  # prefix-cache hits at the first run
    num_received_blocks: int = 0  # KV blocks written by a peer
    num_received_bytes: int = 0


class RequestLedger:
    """Accounting entries of the requests in flight.

    Entries are written on the engine's thread. An entry is up to date for each output that has
    been delivered. The id of a hand-off is the id of its request on this node, such as `a#1`.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[RequestId, Entry] = {}
        self._on_sent: OnSent | None = None
        self._on_change: OnChange | None = None

    def set_sent_callback(self, on_sent: OnSent) -> None:
        """Call `on_sent` for each hand-off whose last write has completed."""
        self._on_sent = on_sent

    def set_change_callback(self, on_change: OnChange) -> None:
        """Call `on_change` when requests are given blocks or blocks are freed."""
        self._on_change = on_change

    @contextmanager
    def open_entry(self, request_id: RequestId) -> Iterator[Entry]:
        """Count for a request until the block ends."""
        entry = self._entries[request_id] = Entry()
        try:
            yield entry
        finally:
            del self._entries[request_id]

    def note_plan(self, plan: Plan) -> None:
        self._notify_change()
        for row in plan.started:
            entry = self._entries.get(row.request_id)
            if entry is None:
                continue
            num_known = min(row.num_prompt_tokens, row.num_computed_tokens)
            if entry.num_computed_prompt_tokens == 0 and entry.num_received_blocks == 0:
                entry.num_cached_prompt_tokens = num_known
            entry.num_computed_prompt_tokens += row.num_prompt_tokens - num_known

    def note_orders(self, orders: KvOrders) -> None:
        if orders.receives:
            self._notify_change()
        for receive in orders.receives:
            entry = self._entries.get(RequestId(str(receive.handoff_id)))
            if entry is not None:
                entry.num_cached_prompt_tokens = receive.first_block * self._block_size

    def note_record(self, record: TransferRecord) -> None:
        entry = self._entries.get(RequestId(str(record.handoff_id)))
        if entry is not None and record.role is TransferRole.RECEIVED and record.outcome == "done":
            entry.num_received_blocks += record.num_blocks
            entry.num_received_bytes += record.num_bytes

    def note_reports(self, reports: KvReports) -> None:
        if reports != NO_REPORTS:
            self._notify_change()
        if self._on_sent is not None:
            for handoff_id in reports.finished_sending:
                self._on_sent(handoff_id)

    def _notify_change(self) -> None:
        if self._on_change is not None:
            self._on_change()


class LedgerRunner:
    """Runner decorator that records plans in the ledger."""

    def __init__(self, runner: Runner, ledger: RequestLedger) -> None:
        self._runner = runner
        self._ledger = ledger

    def run(self, plan: Plan) -> RunResult:
        if (plan.started or plan.dropped) and not plan.is_retry:
            self._ledger.note_plan(plan)
        return self._runner.run(plan)


class LedgerKvWorker:
    """KV worker decorator that records orders, transfers and reports in the ledger."""

    def __init__(self, worker: RecordingKvWorker, ledger: RequestLedger) -> None:
        self._worker = worker
        self._ledger = ledger

    def start(self, orders: KvOrders, now: float) -> None:
        self._ledger.note_orders(orders)
        self._worker.start(orders, now)

    def poll(self, now: float) -> KvReports:
        reports = self._worker.poll(now)
        for record in self._worker.take_records():
            self._ledger.note_record(record)
        self._ledger.note_reports(reports)
        return reports

    def next_poll_s(self, now: float) -> float | None:
        return self._worker.next_poll_s(now)
