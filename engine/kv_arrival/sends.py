"""Blocks that are sent to peers: those of hand-offs, and cached ones that peers pull.

A send holds its own reference on each of its blocks, from the order that names them until the
report that releases them. This is independent of what happens to the request.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from baton.core.ids import BlockId, HandoffId, RequestId
from baton.core.logprobs import FirstToken
from baton.engine.kv_arrival.holds import Hold, Holds
from baton.engine.kv_arrival.orders import StepOrders
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.transfer_order import TransferOrder
from baton.kv_transfer.types import Complete, Send, Withdraw

NUM_EARLY_GRANTS = 10_000  # that are remembered: some of their requests never come


@dataclass(slots=True)
class _PendingSend:
    """Blocks that are being sent to a peer."""

    hold: Hold  # in the order of the hand-off
    request_id: RequestId | None = None  # None: a pull
    num_held: int = 0  # leading places of each block table whose blocks are held
    num_sent: int = 0  # of these, the ones ordered; the pass in progress completes the others
    is_ended: bool = False  # Complete or Withdraw is ordered: no more blocks follow
    is_over: bool = False  # the KV worker has reported the end, possibly early
    is_withdrawn: bool = False
    is_granted: bool = False  # the peer has blocks for it


class BlockSends:
    """Sending side of vLLM's V1 connector, as orders. `withdraw` is its `request_finished`."""

    def __init__(self, holds: Holds, order: TransferOrder, orders: StepOrders) -> None:
        self._holds = holds
        self._order = order
        self._orders = orders
        self._sending: dict[HandoffId, _PendingSend] = {}
        self._early_grants: OrderedDict[HandoffId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sending)

    def is_known(self, handoff_id: HandoffId) -> bool:
        return handoff_id in self._sending

    def open(self, handoff_id: HandoffId, request_id: RequestId) -> bool:
        """Register the hand-off of a waiting request whose blocks will be sent.

        Returns whether the peer has granted it already.
        """
        is_granted = self._early_grants.pop(handoff_id, False) is None
        hold = self._holds.open()
        self._sending[handoff_id] = _PendingSend(hold, request_id, is_granted=is_granted)
        return is_granted

    def note_grant(self, handoff_id: HandoffId) -> RequestId | None:
        """Note that the peer has blocks for a hand-off. Returns its request, if that has come."""
        sending = self._sending.get(handoff_id)
        if sending is not None:
            sending.is_granted = True
            return sending.request_id
        self._early_grants[handoff_id] = None
        if len(self._early_grants) > NUM_EARLY_GRANTS:
            self._early_grants.popitem(last=False)
        return None

    def has_sent(self, handoff_id: HandoffId | None) -> bool:
        return self.num_held(handoff_id) > 0

    def num_held(self, handoff_id: HandoffId | None) -> int:
        """Return the blocks that a hand-off holds; 0 once it is over."""
        sending = None if handoff_id is None else self._sending.get(handoff_id)
        return 0 if sending is None else len(sending.hold.block_ids)

    def send(
        self, handoff_id: HandoffId | None, kv: HeldKv, num_blocks: int, *, by_layer: bool = False
    ) -> None:
        """Order the transfer of the first `num_blocks` of each table, without those ordered.

        Once the last pass has completed all of them, the final ones follow. `by_layer` sends blocks
        while the coming pass completes them, and not the final ones. Another order for the same
        blocks must follow after that pass.
        """
        if handoff_id is None:
            return
        sending = self._sending[handoff_id]
        if sending.is_over or num_blocks <= sending.num_sent:
            return
        held = sending.hold
        self._holds.add(held, self._order.blocks(kv, sending.num_held, num_blocks))
        sending.num_held = num_blocks
        first_block = self._order.index(kv, sending.num_sent)
        if not by_layer:
            sending.num_sent = num_blocks
            if num_blocks == kv.num_blocks:
                self._holds.add(held, kv.context_state)
        block_ids = tuple(held.block_ids[first_block:])
        if block_ids and by_layer:
            self._orders.layer_sends.append(Send(handoff_id, first_block, block_ids))
        elif block_ids:
            self._orders.sends.append(Send(handoff_id, first_block, block_ids))

    def complete(
        self, handoff_id: HandoffId | None, num_tokens: int, first_token: FirstToken
    ) -> None:
        """Order the end of a hand-off whose blocks are all sent, with the first token."""
        if handoff_id is not None and self._end_orders(handoff_id):
            self._orders.completes.append(Complete(handoff_id, num_tokens, first_token))

    def withdraw(self, handoff_id: HandoffId | None, reason: str) -> None:
        """Withdraw the hand-off of a request that ends before its first token."""
        if handoff_id is not None and self._end_orders(handoff_id):
            self._withdraw(handoff_id, reason)

    def withdraw_completed(self, handoff_id: HandoffId, reason: str) -> None:
        """Withdraw a complete hand-off that is not needed, even if its KV is not all sent."""
        sending = self._sending.get(handoff_id)
        if sending is not None and sending.is_ended and not sending.is_withdrawn:
            self._withdraw(handoff_id, reason)

    def withdraw_ungranted(self, reason: str) -> None:
        """Withdraw the last complete hand-off without a grant, unless others will release blocks.

        Those with a grant end once their KV is sent, and withdrawn ones with the next reports.
        """
        holding = {key: each for key, each in self._sending.items() if each.hold.block_ids}
        will_release = any(each.is_granted or each.is_withdrawn for each in holding.values())
        if holding and not will_release:
            self.withdraw_completed(next(reversed(holding)), reason)

    def give(self, handoff_id: HandoffId, block_ids: tuple[BlockId, ...], num_tokens: int) -> bool:
        """Order the transfer of blocks that a peer pulls. Returns False if the id is in use."""
        if handoff_id in self._sending:
            return False
        hold = self._holds.open(block_ids)
        self._sending[handoff_id] = _PendingSend(hold, is_ended=True, is_granted=True)
        self._orders.sends.append(Send(handoff_id, 0, block_ids))
        self._orders.completes.append(Complete(handoff_id, num_tokens, None))
        return True

    def refuse(self, handoff_id: HandoffId, reason: str) -> None:
        """Refuse a peer's pull."""
        if handoff_id not in self._sending:
            self._sending[handoff_id] = _PendingSend(self._holds.open(), is_ended=True)
            self._withdraw(handoff_id, reason)

    def end(self, handoff_id: HandoffId) -> None:
        """Release the blocks of a hand-off. It can end early, when the peer disconnects.

        Reports of hand-offs that are over are ignored.
        """
        sending = self._sending.get(handoff_id)
        if sending is None or sending.is_over:
            return
        self._holds.close(sending.hold)
        sending.hold = Hold()
        sending.is_over = True
        if sending.is_ended:
            del self._sending[handoff_id]

    def _withdraw(self, handoff_id: HandoffId, reason: str) -> None:
        sending = self._sending.get(handoff_id)
        if sending is not None:
            sending.is_withdrawn = True
        self._orders.withdraws.append(Withdraw(handoff_id, reason))

    def _end_orders(self, handoff_id: HandoffId) -> bool:
        """Mark a hand-off as ended. Returns False if the peer needs no message."""
        sending = self._sending.get(handoff_id)
        if sending is None or sending.is_ended:
            return False
        sending.is_ended = True
        if sending.is_over:
            del self._sending[handoff_id]
        return not sending.is_over
