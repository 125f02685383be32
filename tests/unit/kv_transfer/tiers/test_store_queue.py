from __future__ import annotations

from baton.core.ids import BlockId
from baton.core.kv_hints import SHARED, BlockHints, Tenant
from baton.kv_transfer.external_kv import Store, StoreId
from baton.kv_transfer.fence import PASSED
from baton.kv_transfer.tiers.host_stores import StoreQueue, Storing
from tests.support.tier_memory import name_of

A, B = Tenant(b"a"), Tenant(b"b")


def storing(*blocks: tuple[int, Tenant]) -> Storing:
    names = tuple(name_of(number) for number, _ in blocks)
    block_ids = tuple(BlockId(number) for number, _ in blocks)
    hints = tuple(BlockHints(tenant) for _, tenant in blocks)
    return Storing(Store(StoreId(1), names, block_ids, hints), 0, 0.0, PASSED, len(blocks))


def taken(queue: StoreQueue, tenant: Tenant) -> list[int]:
    return [queue.take(tenant).block_id for _ in range(queue.num_waiting(tenant))]


def test_blocks_of_a_tenant_are_taken_in_the_order_of_their_stores() -> None:
    queue = StoreQueue()
    queue.add(storing((1, A), (2, B), (3, A)))
    queue.add(storing((4, A)))
    assert taken(queue, A) == [1, 3, 4]
    assert taken(queue, B) == [2]
    assert not queue


def test_a_store_without_hints_belongs_to_the_shared_tenant() -> None:
    queue = StoreQueue()
    queue.add(Storing(Store(StoreId(1), (name_of(1),), (BlockId(1),)), 0, 0.0, PASSED, 1))
    assert list(queue.tenants) == [SHARED]


def test_stores_alternate_between_tenants() -> None:
    queue = StoreQueue()
    queue.add(storing((1, A), (2, A), (3, B)))
    assert list(queue.tenants) == [A, B]
    queue.take(A)
    queue.end_turn(A)
    assert list(queue.tenants) == [B, A]
    queue.take(B)
    queue.end_turn(B)
    assert list(queue.tenants) == [A]


def test_a_block_put_back_is_first_in_the_queue() -> None:
    queue = StoreQueue()
    queue.add(storing((1, A), (2, A)))
    queue.put_back(queue.take(A))
    assert queue.take_last(A).block_id == 2
    queue.put_back(queue.take(A))
    assert taken(queue, A) == [1]


def test_dropped_blocks_are_removed_from_the_queue() -> None:
    queue = StoreQueue()
    queue.add(storing((1, A), (2, B), (3, A)))
    assert [block.block_id for block in queue.drop({name_of(2), name_of(3), name_of(9)})] == [3, 2]
    assert list(queue.tenants) == [A]
    assert taken(queue, A) == [1]
