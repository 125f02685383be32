"""The two sides of a hand-off in an engine. They share orders and reports, which are values.

What vLLM's V1 connector does in one class stands here in two, so that nobody can call the wrong
side: its `get_num_new_matched_tokens` and `update_state_after_alloc` are `receive`, its metadata
of a step are `take_orders`, its `request_finished` is `withdraw`, and the delayed free is that
blocks stay held until `end_receiving` or `end_sending`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from engine.lifecycle import Request
from engine.request import ReceiveKv
from kv_transfer.types import BlockId, FirstToken, HandoffId, KvOrders, KvReports


class KvScheduling(Protocol):
    """Decides what is received, granted, held and freed. Moves no byte and knows no wire."""

    @property
    def num_receiving(self) -> int: ...

    @property
    def num_granted_blocks(self) -> int: ...

    @property
    def num_sending(self) -> int: ...

    @property
    def total_unknown_reports(self) -> int:
        """Reports of hand-offs that are not known (any more)."""
        ...

    @property
    def has_orders(self) -> bool: ...

    def take_orders(self) -> KvOrders:
        """What the other side is to do, since the last time."""
        ...

    def held_blocks(self) -> Iterator[BlockId]:
        """Every block that a peer may write or that is read for one, once for each hand-off."""
        ...

    def is_known_receive(self, handoff_id: HandoffId) -> bool: ...

    def expect(self, receive: ReceiveKv) -> None:
        """A request waits that will receive."""
        ...

    def receive(self, request: Request, receive: ReceiveKv, num_hits: int) -> None:
        """Lend the request's blocks after its hits to the peer."""
        ...

    def give_up_receiving(self, request: Request) -> None:
        """The request ends. A peer that may already write is asked to stop."""
        ...

    def receiver_of(self, handoff_id: HandoffId) -> Request | None:
        """The request that still waits for this hand-off."""
        ...

    def end_receiving(self, handoff_id: HandoffId) -> None:
        """Nothing can write to its blocks any more."""
        ...

    def is_known_send(self, handoff_id: HandoffId) -> bool: ...

    def open_send(self, handoff_id: HandoffId) -> None:
        """A request waits whose blocks will be sent."""
        ...

    def has_sent(self, request: Request) -> bool: ...

    def send(self, request: Request, num_blocks: int) -> None:
        """Send the first `num_blocks` blocks, less what was sent before."""
        ...

    def send_layers(self, request: Request, num_blocks: int) -> None:
        """The coming pass completes the first `num_blocks` blocks: what it ends may leave in it."""
        ...

    def complete(self, request: Request, first_token: FirstToken) -> None:
        """Every block was sent, and this is the token that follows."""
        ...

    def withdraw(self, request: Request, reason: str) -> None:
        """The request ends before its first token."""
        ...

    def give_up_sending(self, handoff_id: HandoffId, reason: str) -> None:
        """Nobody wants what is complete here and may not have left yet."""
        ...

    def end_sending(self, handoff_id: HandoffId) -> None:
        """Nothing reads its blocks any more. It may come before all is sent: a peer left."""
        ...


class KvWorker(Protocol):
    """Moves KV blocks; never blocks a step. `now` is in monotonic seconds."""

    def start(self, orders: KvOrders, now: float) -> None: ...

    def poll(self, now: float) -> KvReports: ...

    def next_poll_s(self, now: float) -> float | None:
        """How long it can be left alone; None: until somebody wakes the engine."""
        ...
