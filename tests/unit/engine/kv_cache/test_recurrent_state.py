"""Recurrent state in the KV cache: sides of a request, and snapshots of prefixes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from baton.core.ids import NO_BLOCK, BlockId
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import snapshot_end
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.cache_group import PassChunk
from baton.engine.kv_cache.groups import FULL, CacheConfig, CacheLayout, KvCacheSpec, KvGroup
from baton.engine.kv_cache.held_kv import HeldKv, RecurrentState
from baton.engine.plan import BlockIds
from tests.support.requests import make_held

BLOCK_SIZE = 2
WINDOW = KvCacheSpec(window=3)  # a token attends to two before it: to two blocks at most
GROUPS = {
    "full": (KvGroup(FULL),),
    "window": (KvGroup(WINDOW),),
    "both": (KvGroup(FULL), KvGroup(WINDOW)),
}


def test_the_state_side_swaps_with_each_chunk_and_token() -> None:
    one, other = _ids(1, 2), _ids(3, 4)
    state = RecurrentState((one, other), num_tokens=8, prefix_state=_ids(5, 6))

    assert state.sides(8) == (one, other)
    assert state.end_chunk(20) == _ids(5, 6)
    assert [state.sides(n)[0] for n in (20, 21, 22)] == [other, one, other]
    assert state.end_chunk(23) == ()


def test_with_drafts_each_accepted_token_takes_the_next_side() -> None:
    sides = [_ids(number) for number in range(4)]  # for two drafts
    state = RecurrentState(tuple(sides), num_tokens=8)

    assert state.sides(8) == tuple(sides)
    assert state.sides(11) == (sides[3], sides[0], sides[1], sides[2])  # both were accepted
    state.end_chunk(12)
    assert state.sides(12)[0] == sides[1]
    assert state.sides(14)[0] == sides[3]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_prefix_ends_at_a_snapshot(groups: tuple[KvGroup, ...]) -> None:
    cache = _cache(groups)
    _serve(cache, 10, snapshots=(4, 8))

    hits = [cache.find_prefix(make_held(range(20)), most) for most in (10, 8, 7, 3)]

    assert [hit.num_blocks for hit in hits] == [4, 4, 2, 0]
    assert [len(hit.blocks[-1]) for hit in hits] == [3, 3, 3, 0]
    assert hits[2].block_ids[-3:] == hits[2].blocks[-1]


def test_a_prefix_that_another_node_continues_needs_no_snapshot() -> None:
    cache = _cache()
    _serve(cache, 10, snapshots=(4,))

    hit = cache.find_prefix(make_held(range(20)), 20, continues_at=20)

    assert (hit.num_blocks, hit.blocks[-1]) == (5, [])


def test_a_gap_in_a_window_moves_the_hit_to_an_earlier_snapshot() -> None:
    cache = _cache(GROUPS["both"])
    blocks = _serve(cache, 10, snapshots=(4, 8))
    cache.pool.unregister(blocks[1][3:4])

    hit = cache.find_prefix(make_held(range(20)), 19)

    assert hit.num_blocks == 2
    assert NO_BLOCK not in hit.blocks[0]


def test_a_snapshot_without_the_window_before_it_is_no_prefix_hit() -> None:
    cache = _cache(GROUPS["both"])
    blocks = _serve(cache, 10, snapshots=(2, 6))
    cache.pool.unregister(blocks[1][2:3])

    hit = cache.find_prefix(make_held(range(20)), 19)

    # All five blocks are shared: the window's third one is seen only after three blocks.
    assert (hit.num_blocks, hit.num_shared_blocks) == (1, 5)


def test_admission_counts_both_state_sides_and_a_free_snapshot() -> None:
    cache = _cache()
    _serve(cache, 10, snapshots=(8,))
    request = make_held(range(9))
    hit = cache.find_prefix(request, 8)

    assert cache.num_missing(request, hit) == 1 + 4 + 2 * 3 + 3
    assert cache.admit(request, hit)
    cache.check(request.block_ids)
    assert len(request.block_ids) == 1 + 4 + 2 * 3 + 3
    cache.release(request)
    cache.check([])


def test_evicting_one_block_of_a_snapshot_removes_the_snapshot() -> None:
    cache = _cache(num_blocks=16)
    _serve(cache, 4, snapshots=(4,))
    assert _num_snapshots(cache) == 1

    # 11 blocks are free and uncached; the twelfth evicts a block of the snapshot.
    other = make_held(range(50, 62))
    assert cache.admit(other, cache.find_prefix(other, 0))

    assert _num_snapshots(cache) == 0
    cache.check(other.block_ids)
    assert cache.pool.num_cached == 2


def test_snapshots_and_blocks_are_evicted_from_the_end_of_the_sequence() -> None:
    cache = _cache(num_blocks=32)
    _serve(cache, 12, snapshots=(4, 8))
    lengths = []
    while cache.pool.num_cached:
        cache.prefixes.allocate(1)
        lengths.append(cache.find_prefix(make_held(range(20)), 19).num_blocks)

    # Two blocks without a snapshot, then the second snapshot and its blocks, then the first.
    cached = lengths[-12:]
    assert cached == [4, 4, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0]


def test_uncaching_a_request_removes_its_snapshots() -> None:
    cache = _cache()
    request = _computed(cache, 10, snapshots=(4, 8))

    cache.uncache_blocks(request)

    assert _num_snapshots(cache) == 0
    cache.release(request)
    cache.check([])


def test_a_snapshot_is_taken_only_from_free_blocks() -> None:
    cache = _cache(num_blocks=16)
    request = _admitted(cache, 10)  # 5 blocks, and 6 of the sides

    assert _planned(cache, request) == [8]


def test_a_snapshot_that_is_cached_is_not_taken_again() -> None:
    cache = _cache()
    _serve(cache, 10, snapshots=(8,))

    assert _planned(cache, _admitted(cache, 10)) == [6]


def test_an_uncached_request_takes_no_snapshot() -> None:
    cache = _cache()
    request = _admitted(cache, 8)
    cache.reset([request])

    assert _planned(cache, request) == []


def test_a_snapshot_is_cached_once() -> None:
    cache, end = _cache(), BlockHash(b"e" * 16)
    first, second = cache.prefixes.allocate(3), cache.prefixes.allocate(3)
    names = cache.prefixes.ends.parts(end)

    assert cache.prefixes.add_end(end, names, first)
    assert not cache.prefixes.add_end(end, names, second)
    assert cache.pool.find(names) == first


def test_check_detects_an_incomplete_snapshot() -> None:
    cache = _cache()
    _serve(cache, 10, snapshots=(4,))
    request = make_held(range(10))
    hit = cache.find_prefix(request, 4)
    cache.pool.unregister(hit.blocks[-1][:1])

    with pytest.raises(BlocksUnaccounted, match="2 blocks of 3"):
        cache.check([])


def test_the_state_after_the_context_is_transferred() -> None:
    cache = _cache()
    request = _computed(cache, 9)

    assert request.state is not None
    assert request.context_state == request.state.sides(9)[0]


def _cache(groups: tuple[KvGroup, ...] = GROUPS["full"], num_blocks: int = 64) -> KvCache:
    config = CacheConfig(num_blocks, BLOCK_SIZE, CacheLayout(groups, num_state_blocks=3))
    return KvCache(config)


def _num_snapshots(cache: KvCache) -> int:
    return len(set(filter(None, map(snapshot_end, cache.pool.names))))


def _admitted(cache: KvCache, num_tokens: int) -> HeldKv:
    request = make_held(range(num_tokens), request_id="served")
    assert cache.admit(request, cache.find_prefix(request, 0))
    return request


def _planned(cache: KvCache, request: HeldKv) -> list[int]:
    """Return after how many tokens a pass over the whole request takes snapshots."""
    copies = cache.plan_pass([PassChunk(request, 0, request.num_tokens)])
    return [copy.num_tokens for copy in copies.get(request.request_id, ())]


def _computed(cache: KvCache, num_tokens: int, snapshots: Iterable[int] = ()) -> HeldKv:
    request = _admitted(cache, num_tokens)
    request.num_computed_tokens = num_tokens
    cache.end_chunk(request)
    for position in snapshots:
        end = request.block_hashes[position // BLOCK_SIZE - 1]
        block_ids = cache.prefixes.allocate(3)
        assert cache.prefixes.add_end(end, cache.prefixes.ends.parts(end), block_ids)
        cache.pool.release(block_ids)
    return request


def _serve(cache: KvCache, num_tokens: int, snapshots: Iterable[int]) -> list[list[BlockId]]:
    request = _computed(cache, num_tokens, snapshots)
    tables = [list(table) for table in request.block_tables]
    cache.release(request)
    return tables


def _ids(*numbers: int) -> BlockIds:
    return tuple(map(BlockId, numbers))
