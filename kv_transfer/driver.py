"""Interface between the engine and what moves KV: other nodes, tiers, foreign servers. Pure."""

from __future__ import annotations

from baton.kv_transfer.records import TransferRecord
from baton.kv_transfer.types import NO_REPORTS, KvOrders, KvReports


class KvDriver:
    """Moves KV between the KV cache and places of one kind, without blocking a step.

    An engine has one for each kind that it is configured for. `now` is in monotonic seconds.
    """

    def start(self, orders: KvOrders, now: float) -> None:
        """Start the orders that are for this driver."""

    def poll(self, now: float) -> KvReports:
        """Return what has happened since the last call."""
        return NO_REPORTS

    def progress(self, now: float) -> None:
        """Move data while a pass is computed. `poll` reports what has ended."""

    def next_poll_s(self, now: float) -> float | None:
        """Return the time until the next `poll` is needed; None: not before the engine is woken."""
        return None

    def take_records(self) -> tuple[TransferRecord, ...]:
        """Return the hand-offs that ended since the last call."""
        return ()
