"""The scheduler's half of hand-offs: blocks that peers can write or read, and orders for them.

A hand-off holds its own reference on each of its blocks, from the order that names them until
the report that releases them. This is independent of what happens to the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.core.ids import BlockId, HandoffId
from baton.core.logprobs import FirstToken
from baton.core.request import ReceiveKv
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.manager import KvCache
from baton.engine.kv_cache.transfer_order import TransferOrder
from baton.engine.scheduler.request import Request, RequestStatus
from baton.kv_transfer.types import (
    Complete,
    KvOrders,
    Proved,
    Receive,
    Revoke,
    Send,
    SendLayers,
    Withdraw,
)


@dataclass(slots=True)
class _PendingReceive:
    """Blocks that a peer can write."""

    request: Request | None  # None: a pull
    block_ids: tuple[BlockId, ...]
    num_hits: int = 0  # places before these blocks


@dataclass(slots=True)
class _PendingSend:
    """Blocks that are being sent to a peer."""

    block_ids: list[BlockId] = field(default_factory=list)  # in the order of the hand-off
    num_held: int = 0  # leading places of each block table whose blocks are held
    num_sent: int = 0  # of these, the ones ordered; the pass in progress completes the others
    is_ended: bool = False  # Complete or Withdraw is ordered: no more blocks follow
    is_over: bool = False  # the KV worker has reported the end, possibly early
    is_withdrawn: bool = False


class HandoffManager:
    """Block references of hand-offs, and the orders of the next step. Transfers no data.

    vLLM's V1 connector has a scheduler side and a worker side in one class. Here they are two:
    this one and `KvWorker`. They exchange orders and reports only, so no code can call the wrong
    side. `receive` corresponds to `get_num_new_matched_tokens` and `update_state_after_alloc`,
    `take_orders` to the connector metadata of a step, and `withdraw` to `request_finished`.
    Instead of a delayed free, blocks stay held until `end_receiving` or `end_sending`.
    """

    def __init__(self, pool: BlockPool, order: TransferOrder) -> None:
        self._pool = pool
        self._order = order
        self._expected: set[HandoffId] = set()  # of requests not granted yet
        self._receiving: dict[HandoffId, _PendingReceive] = {}
        self._sending: dict[HandoffId, _PendingSend] = {}
        self._receives: list[Receive] = []
        self._revokes: list[Revoke] = []
        self._sends: list[Send] = []
        self._completes: list[Complete] = []
        self._withdraws: list[Withdraw] = []
        self._layer_sends: list[SendLayers] = []
        self.total_unknown_reports = 0  # for unknown hand-offs, such as ended ones

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
        """Return and clear the orders for the KV worker."""
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
        """Yield each block that a peer can write or that is sent to one, once per hand-off."""
        for receiving in self._receiving.values():
            yield from receiving.block_ids
        for sending in self._sending.values():
            yield from sending.block_ids

    # --- receiving ----------------------------------------------------------------

    def is_known_receive(self, handoff_id: HandoffId) -> bool:
        return handoff_id in self._expected or handoff_id in self._receiving

    def expect(self, receive: ReceiveKv) -> None:
        """Register the hand-off of a waiting request that will receive KV."""
        self._expected.add(receive.handoff_id)

    def receive(self, request: Request, receive: ReceiveKv, num_hits: int) -> None:
        """Grant the request's blocks after its prefix hits, and its state, to the peer."""
        handoff_id = receive.handoff_id
        first_block = self._order.index(request.kv, num_hits)
        granted = self._order.blocks(request.kv, num_hits, request.kv.num_blocks)
        block_ids = (*granted, *self._order.state_blocks(request.kv))
        self._pool.hold(block_ids)
        self._expected.discard(handoff_id)
        self._receiving[handoff_id] = _PendingReceive(request, block_ids, num_hits)
        self._receives.append(
            Receive(
                handoff_id,
                receive.source,
                first_block,
                block_ids,
                num_tokens=request.num_tokens,
                num_cached_tokens=request.kv.num_computed_tokens,
            )
        )

    def pull(self, receive: Receive) -> None:
        """Grant blocks to the peer, which sends cached blocks of its own."""
        self._pool.hold(receive.block_ids)
        self._receiving[receive.handoff_id] = _PendingReceive(None, receive.block_ids)
        self._receives.append(receive)

    def cancel_receive(self, request: Request) -> None:
        """Cancel the hand-off of a request that ends. Revokes a grant that the peer has."""
        if request.receive is None:
            return
        self._expected.discard(request.receive.handoff_id)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._revokes.append(Revoke(request.receive.handoff_id))

    def receiver_of(self, handoff_id: HandoffId) -> Request | None:
        """Return the request that waits for this hand-off, if it still does."""
        receiving = self._receiving.get(handoff_id)
        request = None if receiving is None else receiving.request
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return None
        return request

    def receivers(self) -> Iterator[Request]:
        """Yield the requests whose blocks a peer can write, ended ones included."""
        for receiving in self._receiving.values():
            if receiving.request is not None:
                yield receiving.request

    def cache_proved(self, proved: Proved, cache: KvCache) -> None:
        """Cache the first blocks of a hand-off that does not land."""
        receiving = self._receiving.get(proved.handoff_id)
        if receiving is not None and receiving.request is not None:
            block_ids = receiving.block_ids[: proved.num_blocks]
            cache.register_received(receiving.request.kv, receiving.num_hits, block_ids)

    def end_receiving(self, handoff_id: HandoffId) -> None:
        """Release the blocks of a hand-off, which the peer can no longer write."""
        receiving = self._receiving.pop(handoff_id, None)
        if receiving is None:
            self.total_unknown_reports += 1
            return
        self._pool.release(receiving.block_ids)

    # --- sending ------------------------------------------------------------------

    def is_known_send(self, handoff_id: HandoffId) -> bool:
        return handoff_id in self._sending

    def open_send(self, handoff_id: HandoffId) -> None:
        """Register the hand-off of a waiting request whose blocks will be sent."""
        self._sending[handoff_id] = _PendingSend()

    def has_sent(self, request: Request) -> bool:
        handoff_id = request.spec.send_to
        return handoff_id is not None and bool(self._sending[handoff_id].block_ids)

    def send(self, request: Request, num_blocks: int) -> None:
        """Order the transfer of the first `num_blocks` of each table, without those ordered.

        Once the last pass has completed all of them, the state follows.
        """
        handoff_id = request.spec.send_to
        if handoff_id is None:
            return
        sending = self._sending[handoff_id]
        if sending.is_over or num_blocks <= sending.num_sent:
            return
        self._hold(sending, request, num_blocks)
        if num_blocks == request.kv.num_blocks:
            self._hold_state(sending, request)
        first_block = self._order.index(request.kv, sending.num_sent)
        sending.num_sent = num_blocks
        block_ids = tuple(sending.block_ids[first_block:])
        if block_ids:
            self._sends.append(Send(handoff_id, first_block, block_ids))

    def send_layers(self, request: Request, num_blocks: int) -> None:
        """Order layer-wise transfer of the blocks that the coming pass completes.

        After that pass, the first `num_blocks` blocks of each table are complete. The state is not
        sent by layers.
        """
        handoff_id = request.spec.send_to
        if handoff_id is None:
            return
        sending = self._sending[handoff_id]
        if sending.is_over or num_blocks <= sending.num_sent:
            return
        self._hold(sending, request, num_blocks)
        first_block = self._order.index(request.kv, sending.num_sent)
        block_ids = tuple(sending.block_ids[first_block:])
        if block_ids:
            self._layer_sends.append(SendLayers(handoff_id, first_block, block_ids))

    def complete(self, request: Request, first_token: FirstToken) -> None:
        """Order the end of a hand-off whose blocks are all sent, with the first token."""
        handoff_id = request.spec.send_to
        if handoff_id is not None and self._end_send(handoff_id):
            self._completes.append(Complete(handoff_id, request.num_context_tokens, first_token))

    def withdraw(self, request: Request, reason: str) -> None:
        """Withdraw the hand-off of a request that ends before its first token."""
        handoff_id = request.spec.send_to
        if handoff_id is not None and self._end_send(handoff_id):
            self._withdraw(handoff_id, reason)

    def withdraw_completed(self, handoff_id: HandoffId, reason: str) -> None:
        """Withdraw a complete hand-off that is not needed, even if its KV is not all sent."""
        sending = self._sending.get(handoff_id)
        if sending is not None and sending.is_ended and not sending.is_withdrawn:
            self._withdraw(handoff_id, reason)

    def give(self, handoff_id: HandoffId, block_ids: tuple[BlockId, ...], num_tokens: int) -> bool:
        """Order the transfer of blocks that a peer pulls. Returns False if the id is in use."""
        if handoff_id in self._sending:
            return False
        self._pool.hold(block_ids)
        self._sending[handoff_id] = _PendingSend(list(block_ids), is_ended=True)
        self._sends.append(Send(handoff_id, 0, block_ids))
        self._completes.append(Complete(handoff_id, num_tokens, None))
        return True

    def refuse(self, handoff_id: HandoffId, reason: str) -> None:
        """Refuse a peer's pull."""
        if handoff_id not in self._sending:
            self._sending[handoff_id] = _PendingSend(is_ended=True)
            self._withdraw(handoff_id, reason)

    def end_sending(self, handoff_id: HandoffId) -> None:
        """Release the blocks of a hand-off. It can end early, when the peer disconnects."""
        sending = self._sending.get(handoff_id)
        if sending is None or sending.is_over:
            self.total_unknown_reports += 1
            return
        self._pool.release(sending.block_ids)
        sending.block_ids = []
        sending.is_over = True
        if sending.is_ended:
            del self._sending[handoff_id]

    def _hold(self, sending: _PendingSend, request: Request, num_blocks: int) -> None:
        block_ids = self._order.blocks(request.kv, sending.num_held, num_blocks)
        self._pool.hold(block_ids)
        sending.block_ids += block_ids
        sending.num_held = num_blocks

    def _hold_state(self, sending: _PendingSend, request: Request) -> None:
        block_ids = self._order.state_blocks(request.kv)
        self._pool.hold(block_ids)
        sending.block_ids += block_ids

    def _withdraw(self, handoff_id: HandoffId, reason: str) -> None:
        sending = self._sending.get(handoff_id)
        if sending is not None:
            sending.is_withdrawn = True
        self._withdraws.append(Withdraw(handoff_id, reason))

    def _end_send(self, handoff_id: HandoffId) -> bool:
        """Mark a hand-off as ended. Returns False if the peer needs no message."""
        sending = self._sending.get(handoff_id)
        if sending is None or sending.is_ended:
            return False
        sending.is_ended = True
        if sending.is_over:
            del self._sending[handoff_id]
        return not sending.is_over


_NO_ORDERS = KvOrders()
