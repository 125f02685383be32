"""Block pool: allocation, caching, eviction. Random histories are in tests/properties."""

from __future__ import annotations

import pytest

from baton.core.ids import BlockId
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_pool import BlockPool


def test_a_new_pool_allocates_contiguous_blocks() -> None:
    pool = BlockPool(4)

    assert pool.allocate(3) == [0, 1, 2]


def test_a_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(2)

    assert pool.allocate(3) is None
    assert pool.num_free == 2


def test_a_released_run_of_blocks_is_allocated_as_a_run() -> None:
    pool = BlockPool(4)
    pool.release(pool.allocate(3) or [])

    assert pool.allocate(3) == [0, 1, 2]


def test_a_block_is_free_after_its_last_release() -> None:
    pool, blocks = _pool_with(1)
    pool.hold(blocks)

    pool.release(blocks)
    after_first = pool.num_free
    pool.release(blocks)

    assert (after_first, pool.num_free) == (0, 1)


def test_uncached_blocks_are_allocated_before_cached_ones() -> None:
    pool, (cached, blank) = _pool_with(2)
    pool.register(cached, _hash("a"))
    pool.release([cached, blank])

    assert pool.allocate(1) == [blank]
    assert pool.find([_hash("a")]) == [cached]


def test_eviction_follows_release_order_and_starts_at_the_end_of_a_run() -> None:
    pool, (head, tail, other) = _pool_with(3)
    for block, name in ((head, "head"), (tail, "tail"), (other, "other")):
        pool.register(block, _hash(name))
    pool.release([head, tail])
    pool.release([other])

    victims = [pool.allocate(1) for _ in range(3)]

    assert victims == [[tail], [head], [other]]
    assert pool.take_evicted() == (_hash("tail"), _hash("head"), _hash("other"))


def test_a_prefix_hit_moves_a_block_to_the_end_of_the_eviction_order() -> None:
    pool, (old, young) = _pool_with(2)
    pool.register(old, _hash("old"))
    pool.register(young, _hash("young"))
    pool.release([old])
    pool.release([young])

    pool.hold([old])
    pool.release([old])

    assert pool.allocate(1) == [young]


def test_a_prefix_ends_at_the_first_unknown_block() -> None:
    pool, (first, third) = _pool_with(2)
    pool.register(first, _hash("1"))
    pool.register(third, _hash("3"))

    assert pool.find([_hash("1"), _hash("2"), _hash("3")]) == [first]


def test_the_first_of_two_equal_blocks_is_found() -> None:
    pool, (first, second) = _pool_with(2)

    assert pool.register(first, _hash("same"))
    assert not pool.register(second, _hash("same"))
    assert pool.find([_hash("same")]) == [first]


def test_removing_hashes_does_not_release_blocks() -> None:
    pool, (held, free) = _pool_with(2)
    pool.register(held, _hash("held"))
    pool.register(free, _hash("free"))
    pool.release([free])

    pool.forget_hashes()

    assert pool.find([_hash("held")]) == []
    pool.check([held])


def test_check_detects_a_leaked_block() -> None:
    pool, _ = _pool_with(1)

    with pytest.raises(BlocksUnaccounted, match="block 0: ref_cnt 1, holders 0"):
        pool.check([])


def test_check_detects_a_double_release() -> None:
    pool, blocks = _pool_with(1)
    pool.release(blocks)

    with pytest.raises(BlocksUnaccounted, match="block 0: ref_cnt 0, holders 1"):
        pool.check(blocks)


def _pool_with(count: int) -> tuple[BlockPool, list[BlockId]]:
    """Return a pool of `count` blocks, all of them allocated."""
    pool = BlockPool(count)
    blocks = pool.allocate(count)
    assert blocks is not None
    return pool, blocks


def _hash(name: str) -> BlockHash:
    return BlockHash(name.encode())
