"""Holds: one reference on each block, however many hold it."""

from __future__ import annotations

from baton.engine.kv_cache.block_pool import BlockPool, Holds


def test_closing_the_last_hold_frees_a_block() -> None:
    pool = BlockPool(4)
    holds = Holds(pool)
    adopted = holds.adopt(pool.allocate(2) or [])
    other = holds.open(adopted.block_ids)
    holds.add(other, adopted.block_ids[:1])

    holds.close(adopted)
    num_free_before = pool.num_free
    pool.check(holds.block_ids())
    holds.close(other)

    assert (num_free_before, pool.num_free) == (2, 4)
    assert list(holds.block_ids()) == []
