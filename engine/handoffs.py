"""The scheduler's half of hand-offs: the blocks that peers may write or read, and the orders.

A hand-off holds its blocks by itself, beside whatever request uses them, from the order
that names them until the report that lets them go. What becomes of the request changes
nothing about that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.blocks import BlockPool
from engine.lifecycle import Request, RequestStatus
from engine.request import ReceiveKv
from kv_transfer.types import (
    BlockId,
    Complete,
    FirstToken,
    HandoffId,
    KvOrders,
    Receive,
    Revoke,
    Send,
    SendLayers,
    Withdraw,
)


@dataclass(slots=True)
class _Receiving:
    """Blocks that a peer may write."""

    request: Request
    block_ids: tuple[BlockId, ...]


@dataclass(slots=True)
class _Sending:
    """Blocks that are being read for a peer."""

    block_ids: list[BlockId] = field(default_factory=list)
    num_sent: int = 0  # of these; the others are completed by the pass under way
    is_ended: bool = False  # Complete or Withdraw is ordered: nothing more will be sent
    is_over: bool = False  # the wire is done with it, maybe before its time
    is_withdrawn: bool = False


class HandOffs:
    """Keeps to KvScheduling."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._expected: set[HandoffId] = set()  # of requests that may yet receive
        self._receiving: dict[HandoffId, _Receiving] = {}
        self._sending: dict[HandoffId, _Sending] = {}
        self._receives: list[Receive] = []
        self._revokes: list[Revoke] = []
        self._sends: list[Send] = []
        self._completes: list[Complete] = []
        self._withdraws: list[Withdraw] = []
        self._layer_sends: list[SendLayers] = []
        self.total_unknown_reports = 0

    @property
    def num_receiving(self) -> int:
        return len(self._receiving)

    @property
    def num_granted_blocks(self) -> int:
        return sum(len(receiving.block_ids) for receiving in self._receiving.values())

    @property
    def num_sending(self) -> int:
        return len(self._sending)

    @property
    def has_orders(self) -> bool:
        sending = self._sends or self._completes or self._withdraws or self._layer_sends
        return bool(self._receives or self._revokes or sending)

    def take_orders(self) -> KvOrders:
        if not self.has_orders:
            return _NO_ORDERS
        orders = KvOrders(
            receives=tuple(self._receives),
            revokes=tuple(self._revokes),
            sends=tuple(self._sends),
            completes=tuple(self._completes),
            withdraws=tuple(self._withdraws),
            layer_sends=tuple(self._layer_sends),
        )
        self._receives.clear()
        self._revokes.clear()
        self._sends.clear()
        self._completes.clear()
        self._withdraws.clear()
        self._layer_sends.clear()
        return orders

    def held_blocks(self) -> Iterator[BlockId]:
        for receiving in self._receiving.values():
            yield from receiving.block_ids
        for sending in self._sending.values():
            yield from sending.block_ids

    # --- receiving ----------------------------------------------------------------

    def is_known_receive(self, handoff_id: HandoffId) -> bool:
        return handoff_id in self._expected or handoff_id in self._receiving

    def expect(self, receive: ReceiveKv) -> None:
        self._expected.add(receive.handoff_id)

    def receive(self, request: Request, receive: ReceiveKv, num_hits: int) -> None:
        """Lend the request's blocks after its hits to the peer."""
        handoff_id = receive.handoff_id
        block_ids = tuple(request.block_ids[num_hits:])
        self._pool.hold(block_ids)
        self._expected.discard(handoff_id)
        self._receiving[handoff_id] = _Receiving(request, block_ids)
        order = Receive(handoff_id, receive.source, num_hits, block_ids, request.num_tokens)
        self._receives.append(order)

    def give_up_receiving(self, request: Request) -> None:
        """The request ends. A peer that may already write is asked to stop."""
        if request.receive is None:
            return
        self._expected.discard(request.receive.handoff_id)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._revokes.append(Revoke(request.receive.handoff_id))

    def receiver_of(self, handoff_id: HandoffId) -> Request | None:
        """The request that still waits for this hand-off."""
        receiving = self._receiving.get(handoff_id)
        if receiving is None:
            return None
        is_awaited = receiving.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return receiving.request if is_awaited else None

    def end_receiving(self, handoff_id: HandoffId) -> None:
        """Nothing can write to its blocks any more."""
        receiving = self._receiving.pop(handoff_id, None)
        if receiving is None:
            self.total_unknown_reports += 1
            return
        self._pool.release(receiving.block_ids)

    # --- sending ------------------------------------------------------------------

    def is_known_send(self, handoff_id: HandoffId) -> bool:
        return handoff_id in self._sending

    def open_send(self, handoff_id: HandoffId) -> None:
        self._sending[handoff_id] = _Sending()

    def has_sent(self, request: Request) -> bool:
        handoff_id = request.spec.send_to
        return handoff_id is not None and bool(self._sending[handoff_id].block_ids)

    def send(self, request: Request, num_blocks: int) -> None:
        """Send the first `num_blocks` blocks, less what was sent before."""
        handoff_id = request.spec.send_to
        if handoff_id is None:
            return
        sending = self._sending[handoff_id]
        first_block = sending.num_sent
        if sending.is_over or num_blocks <= first_block:
            return
        self._hold(sending, request, num_blocks)
        sending.num_sent = num_blocks
        block_ids = tuple(sending.block_ids[first_block:num_blocks])
        self._sends.append(Send(handoff_id, first_block, block_ids))

    def send_layers(self, request: Request, num_blocks: int) -> None:
        """The coming pass completes the first `num_blocks` blocks: what it ends may leave in it."""
        handoff_id = request.spec.send_to
        if handoff_id is None:
            return
        sending = self._sending[handoff_id]
        first_block = sending.num_sent
        if sending.is_over or num_blocks <= first_block:
            return
        self._hold(sending, request, num_blocks)
        block_ids = tuple(sending.block_ids[first_block:])
        self._layer_sends.append(SendLayers(handoff_id, first_block, block_ids))

    def complete(self, request: Request, first_token: FirstToken) -> None:
        """Every block was sent, and this is the token that follows."""
        handoff_id = request.spec.send_to
        if handoff_id is not None and self._end_send(handoff_id):
            self._completes.append(Complete(handoff_id, request.num_context_tokens, first_token))

    def withdraw(self, request: Request, reason: str) -> None:
        """The request ends before its first token."""
        handoff_id = request.spec.send_to
        if handoff_id is not None and self._end_send(handoff_id):
            self._withdraw(handoff_id, reason)

    def give_up_sending(self, handoff_id: HandoffId, reason: str) -> None:
        """Nobody wants what is complete here and may not have left yet."""
        sending = self._sending.get(handoff_id)
        if sending is not None and sending.is_ended and not sending.is_withdrawn:
            self._withdraw(handoff_id, reason)

    def end_sending(self, handoff_id: HandoffId) -> None:
        """Nothing reads its blocks any more. It may come before all is sent: a peer left."""
        sending = self._sending.get(handoff_id)
        if sending is None or sending.is_over:
            self.total_unknown_reports += 1
            return
        self._pool.release(sending.block_ids)
        sending.block_ids = []
        sending.is_over = True
        if sending.is_ended:
            del self._sending[handoff_id]

    def _hold(self, sending: _Sending, request: Request, num_blocks: int) -> None:
        block_ids = request.block_ids[len(sending.block_ids) : num_blocks]
        self._pool.hold(block_ids)
        sending.block_ids += block_ids

    def _withdraw(self, handoff_id: HandoffId, reason: str) -> None:
        sending = self._sending.get(handoff_id)
        if sending is not None:
            sending.is_withdrawn = True
        self._withdraws.append(Withdraw(handoff_id, reason))

    def _end_send(self, handoff_id: HandoffId) -> bool:
        """False if nobody needs to be told."""
        sending = self._sending.get(handoff_id)
        if sending is None or sending.is_ended:
            return False
        sending.is_ended = True
        if sending.is_over:
            del self._sending[handoff_id]
        return not sending.is_over


_NO_ORDERS = KvOrders()
