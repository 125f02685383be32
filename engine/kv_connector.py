"""Scheduler side and worker side of hand-offs in an engine. They exchange orders and reports.

vLLM's V1 connector has both sides in one class; here they are two, so that no code can call the
wrong side. `receive` corresponds to `get_num_new_matched_tokens` and `update_state_after_alloc`,
`take_orders` to the connector metadata of a step, and `withdraw` to `request_finished`. Instead of
a delayed free, blocks stay held until `end_receiving` or `end_sending`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from engine.request import ReceiveKv
from engine.scheduler.request import Request
from kv_transfer.types import BlockId, FirstToken, HandoffId, KvOrders, KvReports


class KvScheduling(Protocol):
    """Scheduler side: decides on receives, grants and block references. Transfers no data."""

    @property
    def num_receiving(self) -> int: ...

    @property
    def num_granted_blocks(self) -> int: ...

    @property
    def num_sending(self) -> int: ...

    @property
    def total_unknown_reports(self) -> int:
        """Number of reports for unknown hand-offs, such as ended ones."""
        ...

    @property
    def has_orders(self) -> bool: ...

    def take_orders(self) -> KvOrders:
        """Return and clear the orders for the worker side."""
        ...

    def held_blocks(self) -> Iterator[BlockId]:
        """Yield each block that a peer can write or that is sent to one, once per hand-off."""
        ...

    def is_known_receive(self, handoff_id: HandoffId) -> bool: ...

    def expect(self, receive: ReceiveKv) -> None:
        """Register the hand-off of a waiting request that will receive KV."""
        ...

    def receive(self, request: Request, receive: ReceiveKv, num_hits: int) -> None:
        """Grant the request's blocks after its prefix hits to the peer."""
        ...

    def cancel_receive(self, request: Request) -> None:
        """Cancel the hand-off of a request that ends. Revokes a grant that the peer has."""
        ...

    def receiver_of(self, handoff_id: HandoffId) -> Request | None:
        """Return the request that waits for this hand-off, if it still does."""
        ...

    def end_receiving(self, handoff_id: HandoffId) -> None:
        """Release the blocks of a hand-off, which the peer can no longer write."""
        ...

    def is_known_send(self, handoff_id: HandoffId) -> bool: ...

    def open_send(self, handoff_id: HandoffId) -> None:
        """Register the hand-off of a waiting request whose blocks will be sent."""
        ...

    def has_sent(self, request: Request) -> bool: ...

    def send(self, request: Request, num_blocks: int) -> None:
        """Order the transfer of the first `num_blocks` blocks, except those already ordered."""
        ...

    def send_layers(self, request: Request, num_blocks: int) -> None:
        """Order layer-wise transfer of the blocks that the coming pass completes.

        After that pass, the first `num_blocks` blocks of the request are complete.
        """
        ...

    def complete(self, request: Request, first_token: FirstToken) -> None:
        """Order the end of a hand-off whose blocks are all sent, with the first token."""
        ...

    def withdraw(self, request: Request, reason: str) -> None:
        """Withdraw the hand-off of a request that ends before its first token."""
        ...

    def withdraw_completed(self, handoff_id: HandoffId, reason: str) -> None:
        """Withdraw a complete hand-off that is not needed, even if its KV is not all sent."""
        ...

    def end_sending(self, handoff_id: HandoffId) -> None:
        """Release the blocks of a hand-off. It can end early, when the peer disconnects."""
        ...


class KvWorker(Protocol):
    """Worker side: transfers KV blocks without blocking a step. `now` is in monotonic seconds."""

    def start(self, orders: KvOrders, now: float) -> None: ...

    def poll(self, now: float) -> KvReports: ...

    def next_poll_s(self, now: float) -> float | None:
        """Return the time until the next `poll` is needed; None: not before the engine is woken."""
        ...
