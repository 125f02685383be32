"""KV cache with several groups: prefixes, tables and the blocks that are given back."""

from __future__ import annotations

import pytest

from baton.core.ids import NO_BLOCK, BlockId
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.groups import FULL, CacheConfig, CacheLayout, KvCacheSpec, KvGroup
from baton.engine.kv_cache.held_kv import HeldKv
from tests.support.requests import make_held

BLOCK_SIZE = 2
WINDOW = KvCacheSpec(window=3)  # a token attends to two before it: to two blocks at most
TWO_GROUPS = (KvGroup(FULL), KvGroup(WINDOW))


def test_every_group_has_a_table_of_the_same_length() -> None:
    cache = _cache()
    request = _admitted(cache, 5)

    assert request.block_tables == ([0, 1, 2], [3, 4, 5])
    assert cache.capacity(request) == 6
    assert cache.grow(request, 7) == ((6,), (7,))


def test_blocks_behind_the_window_are_free_and_still_cached() -> None:
    cache = _cache()
    request = _computed(cache, 8)

    cache.release_unseen(request)

    assert request.block_tables == ([0, 1, 2, 3], [NO_BLOCK, NO_BLOCK, NO_BLOCK, 7])
    assert cache.pool.num_free == cache.pool.num_blocks - 5
    cache.pool.check(request.block_ids)
    assert cache.find_prefix(make_held(range(9)), 8).blocks[1][3:] == [7]


@pytest.mark.parametrize(
    ("evicted", "hit"),
    [
        ((), ([0, 1], [NO_BLOCK, 4])),
        ((3,), ([0, 1], [NO_BLOCK, 4])),
        ((4,), ([0], [3])),
        ((3, 4), ([], [])),
    ],
)
def test_the_worked_example_of_the_cache_holds(
    evicted: tuple[int, ...], hit: tuple[list[int], ...]
) -> None:
    cache = _cache()
    request = _admitted(cache, 5)
    assert request.block_tables == ([0, 1, 2], [3, 4, 5])
    request.num_computed_tokens = 4
    cache.register(request)
    cache.release_unseen(request)
    assert request.block_tables == ([0, 1, 2], [NO_BLOCK, 4, 5])

    _uncache(cache, *evicted)

    assert cache.find_prefix(make_held(range(5)), 4).blocks == hit


def test_a_prefix_needs_only_the_last_blocks_of_a_window() -> None:
    cache = _cache()
    _serve(cache, 8)
    _uncache(cache, 4, 5)  # the window's blocks 0 and 1

    assert cache.find_prefix(make_held(range(9)), 8).num_blocks == 4
    # After two blocks, the next token attends to tokens of block 1, which is gone.
    assert cache.find_prefix(make_held(range(9)), 4).num_blocks == 0


def test_a_gap_in_the_window_shortens_the_prefix_of_all_groups() -> None:
    cache = _cache()
    _serve(cache, 8)
    _uncache(cache, 7)  # the window's block 3

    hit = cache.find_prefix(make_held(range(9)), 8)

    assert (hit.num_blocks, hit.blocks) == (3, ([0, 1, 2], [NO_BLOCK, NO_BLOCK, 6]))


def test_a_prefix_shortened_by_one_group_is_checked_again_in_the_others() -> None:
    cache = _cache((KvGroup(FULL), KvGroup(WINDOW), KvGroup(WINDOW)))
    _serve(cache, 8)
    _uncache(cache, 6, 11)  # block 2 of the first window and block 3 of the second

    # After four blocks, only block 3 of the windows is needed; after three, block 2 is.
    assert cache.find_prefix(make_held(range(9)), 8).num_blocks == 2


def test_a_prefix_that_another_node_continues_needs_no_window() -> None:
    cache = _cache()
    _serve(cache, 4)
    _uncache(cache, 2, 3)  # all of the window's blocks

    hit = cache.find_prefix(make_held(range(9)), 9, continues_at=9)

    assert (hit.num_blocks, hit.blocks) == (2, ([0, 1], [NO_BLOCK, NO_BLOCK]))


def test_blocks_outside_the_window_are_no_prefix_hits() -> None:
    cache = _cache(groups=(KvGroup(WINDOW),))

    assert cache.find_prefix(make_held(range(9)), 9, continues_at=9).num_blocks == 0


def test_a_request_that_continues_elsewhere_gets_the_blocks_of_its_window() -> None:
    cache = _cache()
    request = make_held(range(9))
    hit = cache.find_prefix(request, 9, continues_at=9)

    assert cache.num_missing(request, hit) == 5 + 2
    assert cache.admit(request, hit)
    assert request.block_tables[1] == [NO_BLOCK, NO_BLOCK, NO_BLOCK, 5, 6]


def test_a_hand_off_leaves_out_blocks_behind_the_window() -> None:
    cache = _cache()
    request = _computed(cache, 9)
    full, window = request.block_tables
    order = cache.transfer_order

    assert order.blocks(request, 0, 5) == [*full[:4], window[3], full[4], window[4]]
    assert order.blocks(request, 4, 5) == [full[4], window[4]]
    assert [order.index(request, num) for num in range(6)] == [0, 1, 2, 3, 5, 7]


def _cache(groups: tuple[KvGroup, ...] = TWO_GROUPS) -> KvCache:
    return KvCache(CacheConfig(16, BLOCK_SIZE, CacheLayout(groups)))


def _uncache(cache: KvCache, *block_ids: int) -> None:
    cache.pool.unregister(map(BlockId, block_ids))


def _admitted(cache: KvCache, num_tokens: int) -> HeldKv:
    request = make_held(range(num_tokens), request_id="served")
    assert cache.admit(request, cache.find_prefix(request, 0))
    return request


def _computed(cache: KvCache, num_tokens: int) -> HeldKv:
    request = _admitted(cache, num_tokens)
    request.num_computed_tokens = num_tokens
    cache.register(request)
    return request


def _serve(cache: KvCache, num_tokens: int) -> None:
    cache.release(_computed(cache, num_tokens))
