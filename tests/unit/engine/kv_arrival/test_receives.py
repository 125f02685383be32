"""Receives without a scheduler: blocks, orders and fills to follow."""

from __future__ import annotations

from baton.core.ids import HandoffId, NodeId, Peer
from baton.core.request import ReceiveKv
from baton.engine.kv_arrival.arrival import Arrival
from baton.engine.kv_arrival.fills import Fills
from baton.engine.kv_arrival.receives import BlockReceives
from baton.engine.kv_cache.block_pool import Holds
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.groups import CacheConfig
from baton.kv_transfer.types import NO_KV_ORDERS, StepOrders
from tests.support.requests import make_held

ID = HandoffId("r", 1)
HANDOFF = ReceiveKv(ID, Peer(NodeId("p"), "host:1"))


class Receiving:
    """A request of six tokens in three blocks, of which the first was a prefix hit."""

    def __init__(self) -> None:
        cache = KvCache(CacheConfig(num_blocks=4, block_size=2))
        self.holds, self.orders = Holds(cache.pool), StepOrders()
        fills = Fills(cache, self.holds, max_wait_s=5.0)
        self.receives = BlockReceives(cache, self.holds, fills, self.orders)
        self.arrival = Arrival(make_held(range(6)), (0, 0.0, 0), HANDOFF)
        self.arrival.kv.block_tables = (cache.pool.allocate(3) or [],)
        self.receives.expect(HANDOFF)
        self.receives.grant(self.arrival, num_hits=1, now=0.0)

    @property
    def held(self) -> list[int]:
        return list(self.holds.block_ids())


def test_orders_are_returned_once() -> None:
    it = Receiving()

    first, second = it.orders.take(), it.orders.take()

    assert len(first.receives) == 1
    assert second == NO_KV_ORDERS
    assert not it.orders
    assert it.held == it.arrival.kv.block_ids[1:]


def test_giving_up_a_receive_orders_a_revoke_and_keeps_the_blocks() -> None:
    it = Receiving()
    it.orders.take()

    it.receives.stop(it.arrival, revokes=True)

    assert it.orders.take().revokes == (ID,)
    assert it.held == it.arrival.kv.block_ids[1:]


def test_a_receive_ends_once() -> None:
    it = Receiving()

    it.receives.end(ID)
    it.receives.end(ID)

    assert it.held == []


def test_a_stopped_request_is_no_longer_the_receiver() -> None:
    it = Receiving()
    before = it.receives.receiver_of(ID)

    fill = it.receives.stop(it.arrival, revokes=False)

    assert before is it.arrival
    assert fill is not None
    assert fill.arrival is it.arrival
    assert it.receives.receiver_of(ID) is None
