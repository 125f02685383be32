"""Search for prefixes over all kinds of memory, next to a search that tries every length."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import BlockId
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import name_in_group, snapshot_names
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.groups import FULL, CacheConfig, CacheLayout, KvCacheSpec, KvGroup
from tests.support.requests import make_held

BLOCK_SIZE, NUM_BLOCKS, MAX_STATE_BLOCKS = 2, 6, 2
SPECS = [FULL, *(KvCacheSpec(window=n) for n in (1, 3, 4)), KvCacheSpec(chunk=4)]
SOME_SPECS = st.lists(st.sampled_from(SPECS), min_size=1, max_size=3)

Specs = list[KvCacheSpec]


@given(SOME_SPECS, st.integers(0, MAX_STATE_BLOCKS), st.booleans(), st.data())
def test_the_longest_prefix_that_all_groups_can_continue_is_found(
    specs: Specs, num_state_blocks: int, is_continued_elsewhere: bool, data: st.DataObject
) -> None:
    cache, held = _cache(specs, num_state_blocks), make_held(range(NUM_BLOCKS * BLOCK_SIZE))
    held.extend_hashes(BLOCK_SIZE)
    cached = _fill(cache, data.draw(st.sets(st.sampled_from(_units(specs, held.block_hashes)))))
    continues_at = NUM_BLOCKS * BLOCK_SIZE if is_continued_elsewhere else None

    hit = cache.find_prefix(held, NUM_BLOCKS * BLOCK_SIZE, continues_at=continues_at)

    # The longest one may need no blocks at all, behind a chunk: then it is no hit.
    every = [
        _needed(specs, num_state_blocks, held.block_hashes, num_blocks, continues_at)
        for num_blocks in range(NUM_BLOCKS + 1)
    ]
    longest = [needed for needed in every if cached.keys() >= set(needed)][-1]
    assert sorted(hit.block_ids) == sorted(cached[name] for name in longest)
    assert all(len(table) == hit.num_blocks for table in hit.blocks[: len(specs)])


def _cache(specs: Specs, num_state_blocks: int) -> KvCache:
    layout = CacheLayout(tuple(map(KvGroup, specs)), num_state_blocks)
    return KvCache(CacheConfig(64, BLOCK_SIZE, layout))


def _units(specs: Specs, hashes: list[BlockHash]) -> list[tuple[BlockHash, int]]:
    """Return what can be cached: blocks by group, and snapshots as the group after the last."""
    return [(each, group) for each in hashes for group in range(len(specs) + 1)]


def _fill(cache: KvCache, units: Iterable[tuple[BlockHash, int]]) -> dict[BlockHash, BlockId]:
    """Add blocks and snapshots to the prefix cache. Returns the blocks by name."""
    cached: dict[BlockHash, BlockId] = {}
    for block_hash, group in units:
        if group < cache.num_groups:
            names = [name_in_group(block_hash, group)]
        else:
            names = cache.prefixes.ends.parts(block_hash)
        block_ids = cache.prefixes.allocate(len(names))
        if group < cache.num_groups:
            cache.pool.register(block_ids[0], names[0])
        else:
            cache.prefixes.add_end(block_hash, names, block_ids)
        cached |= zip(names, block_ids, strict=True)
    return cached


def _needed(
    specs: Specs,
    num_state_blocks: int,
    hashes: list[BlockHash],
    num_blocks: int,
    continues_at: int | None,
) -> list[BlockHash]:
    """Return the names of the blocks without which a prefix of this length cannot be continued."""
    position = num_blocks * BLOCK_SIZE if continues_at is None else continues_at
    names = [
        name_in_group(hashes[place], group)
        for group, spec in enumerate(specs)
        for place in range(spec.num_unseen(position) // BLOCK_SIZE, num_blocks)
    ]
    if num_blocks and continues_at is None:
        names += snapshot_names(hashes[num_blocks - 1], len(specs), num_state_blocks)
    return names
