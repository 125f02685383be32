"""Sends without a scheduler: blocks and orders."""

from __future__ import annotations

from baton.core.ids import HandoffId, RequestId
from baton.core.output import FirstToken
from baton.engine.kv_arrival.sends import BlockSends
from baton.engine.kv_cache.block_pool import BlockPool, Holds
from baton.engine.kv_cache.groups import FULL
from baton.engine.kv_cache.held_kv import TransferOrder
from baton.kv_transfer.types import NO_KV_ORDERS, Complete, StepOrders, Withdraw
from tests.support.requests import make_held

ID = HandoffId("r", 1)
FIRST = FirstToken(7)


class Sending:
    """A request of six tokens in three blocks, which are to be sent."""

    def __init__(self) -> None:
        pool = BlockPool(4)
        self.holds, self.orders = Holds(pool), StepOrders()
        self.sends = BlockSends(self.holds, TransferOrder([FULL], block_size=2), self.orders)
        self.kv = make_held(range(6))
        self.kv.block_tables = (pool.allocate(3) or [],)
        self.sends.open(ID, RequestId("request"))


def test_blocks_are_sent_once_each() -> None:
    it = Sending()

    for num_blocks in (1, 1, 3):
        it.sends.send(ID, it.kv, num_blocks)

    sends = it.orders.take().sends
    assert [(send.first_block, send.block_ids) for send in sends] == [(0, (0,)), (1, (1, 2))]
    assert it.sends.has_sent(ID)


def test_a_send_is_completed_or_withdrawn_and_never_both() -> None:
    it = Sending()

    it.sends.complete(ID, 6, FIRST)
    it.sends.withdraw(ID, "too late")

    orders = it.orders.take()
    assert orders.completes == (Complete(ID, 6, FIRST),)
    assert orders.withdraws == ()


def test_a_send_is_pending_until_it_is_ended_on_both_sides() -> None:
    it = Sending()
    it.sends.withdraw(ID, "abort")
    before = len(it.sends)

    it.sends.end(ID)

    assert it.orders.take().withdraws == (Withdraw(ID, "abort"),)
    assert (before, len(it.sends)) == (1, 0)


def test_an_early_end_of_a_send_releases_its_blocks_and_stops_orders() -> None:
    it = Sending()
    it.sends.send(ID, it.kv, 2)
    it.orders.take()

    it.sends.end(ID)
    it.sends.send(ID, it.kv, 3)
    it.sends.complete(ID, 6, FIRST)

    assert it.orders.take() == NO_KV_ORDERS
    assert list(it.holds.block_ids()) == []
    assert len(it.sends) == 0


def test_a_send_ends_once() -> None:
    it = Sending()

    it.sends.end(ID)
    it.sends.end(ID)

    assert list(it.holds.block_ids()) == []
