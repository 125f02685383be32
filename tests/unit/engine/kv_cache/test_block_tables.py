"""Block tables that break an invariant are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.core.ids import NO_BLOCK
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.groups import FULL, CacheConfig, CacheLayout, KvCacheSpec, KvGroup
from baton.engine.kv_cache.held_kv import HeldKv
from tests.support.requests import make_held

WINDOW = KvCacheSpec(window=3)  # with two tokens a block, it needs two blocks at most

Damage = Callable[[KvCache, HeldKv], None]


def drop_a_needed_block(cache: KvCache, request: HeldKv) -> None:
    cache.pool.release([request.block_tables[1][3]])
    request.block_tables[1][3] = NO_BLOCK


def drop_a_block_of_full_attention(cache: KvCache, request: HeldKv) -> None:
    cache.pool.release([request.block_tables[0][0]])
    request.block_tables[0][0] = NO_BLOCK


def leave_a_gap(cache: KvCache, request: HeldKv) -> None:
    cache.pool.release([request.block_tables[1][1]])
    request.block_tables[1][1] = NO_BLOCK


def shorten_a_table(cache: KvCache, request: HeldKv) -> None:
    cache.pool.release([request.block_tables[1].pop()])


def swap_groups(_: KvCache, request: HeldKv) -> None:
    request.block_tables = request.block_tables[::-1]


def swap_places(_: KvCache, request: HeldKv) -> None:
    table = request.block_tables[0]
    table[0], table[1] = table[1], table[0]


def cache_a_state(cache: KvCache, request: HeldKv) -> None:
    assert request.state is not None
    cache.pool.register(request.state.block_ids[0], BlockHash(request.block_hashes[-1] + b"\x09"))


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (drop_a_needed_block, r"group 1 \(window 3\): 1 blocks are missing"),
        (drop_a_block_of_full_attention, r"group 0 \(full\): 1 blocks are missing, 0 unseen"),
        (leave_a_gap, r"group 1 .*missing"),
        (shorten_a_table, r"tables of \[3, 4\] blocks"),
        (swap_groups, r"block 4 at place 0 is cached as"),
        (swap_places, r"block 1 at place 0 is cached as"),
        (cache_a_state, "a block of its state is cached"),
    ],
)
def test_check_detects_a_damaged_block_table(damage: Damage, finding: str) -> None:
    cache, request = _computed(8)
    cache.check(request.block_ids, [request])

    damage(cache, request)

    with pytest.raises(BlocksUnaccounted, match=finding):
        cache.check(request.block_ids, [request])


def test_blocks_behind_a_window_may_be_missing() -> None:
    cache, request = _computed(8)

    cache.release_unseen(request)

    assert request.block_tables[1][:3] == [NO_BLOCK] * 3
    cache.check(request.block_ids, [request])


def _computed(num_tokens: int) -> tuple[KvCache, HeldKv]:
    groups = (KvGroup(FULL), KvGroup(WINDOW))
    cache = KvCache(CacheConfig(32, 2, CacheLayout(groups, num_state_blocks=2)))
    request = make_held(range(num_tokens))
    assert cache.admit(request, cache.find_prefix(request, 0))
    request.num_computed_tokens = num_tokens
    cache.end_chunk(request)
    cache.register(request)
    return cache, request
