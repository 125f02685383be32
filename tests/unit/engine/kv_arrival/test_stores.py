"""Stores of blocks to a KV cache outside the engine: turns and limits of tenants."""

from __future__ import annotations

import random

from baton.core.fair_queue import FairQueue
from baton.core.kv_hints import SHARED, Tenant, tenant_of
from tests.support.engine_world import EngineWorld

A, B = Tenant(b"a"), Tenant(b"b")


def queue_of(*items: tuple[int, Tenant]) -> FairQueue[Tenant, int]:
    queue = FairQueue[Tenant, int]()
    for item, tenant in items:
        queue.add(tenant, item)
    return queue


def test_tenants_take_turns_and_blocks_of_one_are_in_order() -> None:
    queue = queue_of((1, A), (2, A), (3, A), (4, B), (5, SHARED))

    assert [queue.take() for _ in range(6)] == [1, 4, 5, 2, 3, None]


def test_a_tenant_that_may_store_nothing_is_passed_over() -> None:
    queue = queue_of((1, A), (2, B))

    assert queue.take(lambda tenant: tenant != A) == 2
    assert not queue.has_any(lambda tenant: tenant != A)
    assert queue.has_any(lambda _: True)


def test_slow_stores_of_a_tenant_leave_room_for_those_of_others() -> None:
    it = EngineWorld(num_blocks=32, block_size=4, external_chance=random.Random(0))
    external = it.external
    assert external is not None
    external._fails = False
    slow, other = tenant_of("slow"), tenant_of("other")
    external.can_end = lambda store: store.hints[0].tenant != slow

    it.add(40, cache_salt="slow", max_tokens=1)
    it.add(14, cache_salt="other", max_tokens=1)
    it.step_until(lambda _: len(external.blocks) == 3)

    assert {external.stored_hints[name].tenant for name in external.blocks} == {other}
    slow_stores = [each.store for each in external.stores]
    assert {hints.tenant for store in slow_stores for hints in store.hints} == {slow}
    assert sum(len(store.names) for store in slow_stores) == 4  # half of a quarter of the cache

    external.can_end = lambda store: True
    it.run_to_end()
    assert len(external.blocks) == 13
