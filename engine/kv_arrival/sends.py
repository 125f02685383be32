"""Blocks that are sent to peers: those of hand-offs, and cached ones that peers pull.

A send holds its own reference on each of its blocks, from the order that names them until the
report that releases them. This is independent of what happens to the request.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.core.ids import BlockId, HandoffId, RequestId
from baton.core.output import FirstToken
from baton.engine.kv_arrival.fills import FillId
from baton.engine.kv_arrival.loads import ExternalLoads
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_pool import Hold, Holds
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.held_kv import HeldKv, TransferOrder
from baton.kv_transfer.types import (
    NOT_CACHED,
    TOO_MANY_PULLS,
    Complete,
    KvReports,
    Requested,
    Send,
    StepOrders,
    Withdraw,
)

NUM_EARLY_GRANTS = 10_000  # that are remembered: some of their requests never come
MAX_GIVEN_SHARE = 0.5  # of all blocks, for all pulls together
MAX_WAITING = 1024  # runs


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


class GivenPulls:
    """The other side of pulls: cached blocks that peers request by name.

    Blocks that only an external KV cache of this node has are loaded first. Only a part of the
    cache is given at a time, since blocks cannot be evicted while they are sent. Other requests
    wait for their turn, in order of arrival.
    """

    def __init__(self, cache: KvCache, sends: BlockSends, loads: ExternalLoads) -> None:
        self._pool = cache.pool
        self._sends = sends
        self._loads = loads
        self._block_size = cache.block_size
        self._max_blocks = int(cache.pool.num_blocks * MAX_GIVEN_SHARE)
        self._waiting: deque[Requested] = deque()
        self._loading: dict[FillId, Requested] = {}
        self._given: dict[HandoffId, tuple[BlockId, ...]] = {}
        self._num_given = 0  # blocks that are given or loaded

    def settle(self, reports: KvReports, ended: Iterable[FillId], now: float) -> None:
        """Apply the ends of given pulls and of loads for them, and give the blocks of new ones."""
        for handoff_id in reports.finished_sending:
            self._num_given -= len(self._given.pop(handoff_id, ()))
        for fill_id in ended:
            self._end_load(fill_id)
        for requested in reports.requested:
            is_too_large = len(requested.names) > self._max_blocks
            if is_too_large or len(self._waiting) >= MAX_WAITING:
                self._sends.refuse(requested.handoff_id, TOO_MANY_PULLS)
            else:
                self._waiting.append(requested)
        self._give_waiting(now)

    def withdraw(self, block_ids: Iterable[BlockId]) -> None:
        """Withdraw the pulls that send any of these blocks: their KV may be wrong."""
        wrong = set(block_ids)
        for handoff_id, given in self._given.items():
            if not wrong.isdisjoint(given):
                self._sends.withdraw_completed(handoff_id, "the KV may be wrong")

    def _give_waiting(self, now: float) -> None:
        while self._waiting:
            if self._num_given + len(self._waiting[0].names) > self._max_blocks:
                return
            requested = self._waiting.popleft()
            block_ids = self._find(requested)
            if None not in block_ids or not self._try_load(requested, block_ids, now):
                self._give(requested, block_ids)

    def _find(self, requested: Requested) -> list[BlockId | None]:
        """Return the cached block of each name; None for those that are not cached."""
        found = (self._pool.find([BlockHash(name)]) for name in requested.names)
        return [block_ids[0] if block_ids else None for block_ids in found]

    def _try_load(
        self, requested: Requested, block_ids: Sequence[BlockId | None], now: float
    ) -> bool:
        """Load the missing blocks. Returns False if that is not possible."""
        names = zip(requested.names, block_ids, strict=True)
        missing = [name for name, block_id in names if block_id is None]
        cached = [block_id for block_id in block_ids if block_id is not None]
        fill_id = self._loads.load_for_peer(missing, cached, now)
        if fill_id is None:
            return False
        self._loading[fill_id] = requested
        self._num_given += len(requested.names)
        return True

    def _end_load(self, fill_id: FillId) -> None:
        requested = self._loading.pop(fill_id, None)
        if requested is not None:
            self._num_given -= len(requested.names)
            self._give(requested, self._find(requested))

    def _give(self, requested: Requested, found: Sequence[BlockId | None]) -> None:
        block_ids = tuple(block_id for block_id in found if block_id is not None)
        if len(block_ids) < len(found):
            self._sends.refuse(requested.handoff_id, NOT_CACHED)
            return
        num_tokens = len(block_ids) * self._block_size
        if self._sends.give(requested.handoff_id, block_ids, num_tokens):
            self._given[requested.handoff_id] = block_ids
            self._num_given += len(block_ids)
