"""Stores of many tenants while the external KV cache has no room: no work, and bounded memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from baton.core.ids import BlockId, BlockName, RequestId
from baton.core.kv_hints import BlockHints, Tenant
from baton.engine.kv_arrival.stores import BlockStores
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_pool import Holds
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.kv_cache.held_kv import HeldKv
from baton.kv_transfer.external_kv import ExternalOrders, ExternalReports
from baton.kv_transfer.types import StepOrders
from tests.support.function_calls import count_calls

NUM_BLOCKS = 64


class EmptyExternal:
    """Holds nothing, and ends no store."""

    def holds(self, name: BlockName) -> bool:
        return False

    def load_s(self, names: Sequence[BlockName]) -> float:
        return 1.0

    def start(self, orders: ExternalOrders) -> None: ...

    def poll(self) -> ExternalReports:
        return ExternalReports()

    def clear(self, tiers: Collection[str] | None = None) -> Mapping[str, int]:
        return {}


class Stores:
    def __init__(self) -> None:
        self.cache = KvCache(CacheConfig(num_blocks=NUM_BLOCKS), is_stored=True)
        holds = Holds(self.cache.pool)
        self.orders = StepOrders()
        self.stores = BlockStores(self.cache, holds, self.orders, EmptyExternal())

    def cache_blocks(self, numbers: range, *, tenant: str = "") -> None:
        """Compute and release blocks, which evict others; each of a tenant of its own."""
        for number in numbers:
            name = BlockHash(number.to_bytes(16, "big"))
            owner = Tenant((tenant or str(number)).encode())
            held = HeldKv(RequestId("r"), (), name, BlockHints(owner))
            [block_id] = self.cache.prefixes.allocate(1)
            self.cache.prefixes.register(held, block_id, name)
            self.cache.pool.release([block_id])

    def step(self) -> None:
        self.stores.store_new()
        assert not self.stores.can_begin

    @property
    def ordered(self) -> list[BlockId]:
        return [block_id for store in self.orders.stores for block_id in store.block_ids]


def test_without_room_the_cost_of_a_step_does_not_depend_on_the_tenants_that_wait() -> None:
    costs = []
    for num_tenants in (30, 60):
        it = Stores()
        it.cache_blocks(range(num_tenants))
        it.step()
        costs.append(count_calls(it.step))
        assert len(it.ordered) == NUM_BLOCKS // 4

    assert costs[0] == costs[1]


def test_without_room_the_blocks_that_wait_are_no_more_than_twice_those_of_the_pool() -> None:
    it = Stores()
    it.cache_blocks(range(16), tenant="first")
    it.step()
    for first in range(100, 2000, 10):
        it.cache_blocks(range(first, first + 10))
        assert len(it.cache.prefixes.unstored) <= 2 * NUM_BLOCKS


def test_blocks_that_are_cached_keep_their_turn_when_evicted_ones_are_dropped() -> None:
    it = Stores()
    it.cache_blocks(range(500))
    cached = {it.cache.pool.find([name])[0] for name in it.cache.pool.names}
    it.step()

    assert len(it.ordered) == NUM_BLOCKS // 4
    assert set(it.ordered) <= cached
