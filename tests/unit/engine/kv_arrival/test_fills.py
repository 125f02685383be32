"""Fills of blocks: what is cached of them, and which of them a request finds by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.core.ids import BlockName
from baton.engine.kv_arrival.arrival import Arrival
from baton.engine.kv_arrival.fills import Fill, Fills, FillsByName
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_pool import Holds
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.external_prefix import ExternalPrefix
from baton.engine.kv_cache.groups import CacheConfig
from tests.support.requests import make_held

MAX_WAIT_S = 5.0


class Filling:
    """A cache of eight blocks, of two tokens each."""

    def __init__(self) -> None:
        self.cache = KvCache(CacheConfig(num_blocks=8, block_size=2))
        self.holds = Holds(self.cache.pool)
        self.fills = Fills(self.cache, self.holds, MAX_WAIT_S)

    def arrival(self, num_tokens: int = 7) -> Arrival:
        arrival = Arrival(make_held(range(num_tokens)), rank=(0, 0.0, 0))
        self.cache.find_prefix(arrival.kv, num_tokens)  # which computes its names
        return arrival

    def begin(self, arrival: Arrival | None, names: Sequence[BlockName], now: float = 0.0) -> Fill:
        num_blocks = len(names)
        prefix = ExternalPrefix(
            names=tuple(names),
            groups=(0,) * num_blocks,
            places=tuple(range(num_blocks)),
            are_cached=(False,) * num_blocks,
            num_gained=num_blocks,
            num_blocks=num_blocks,
            num_independent=num_blocks,
        )
        return self.fills.begin(prefix, now, arrival)

    def num_cached(self, names: Sequence[BlockName]) -> int:
        return len(self.cache.pool.find(map(BlockHash, names)))


def test_blocks_are_cached_when_filled_and_evictable_when_the_fill_ends() -> None:
    it = Filling()
    arrival = it.arrival()
    names = arrival.kv.block_hashes
    fill = it.begin(arrival, names)

    it.fills.note_filled(fill, 0, ["host", "host"])
    num_free_before = it.cache.pool.num_free
    it.fills.note_filled(fill, 2, [None])
    it.fills.end(fill)

    assert (num_free_before, it.cache.pool.num_free) == (5, 8)
    assert it.num_cached(names) == 2
    assert arrival.tokens_by_source(num_cached=6) == {"host": 4}
    it.cache.check(it.holds.block_ids())


@pytest.mark.parametrize("is_for_peer", [False, True])
def test_a_fill_interrupted_by_a_reset_is_not_cached(is_for_peer: bool) -> None:
    it = Filling()
    arrival = it.arrival()
    names = list(arrival.kv.block_hashes)
    fill = it.begin(None if is_for_peer else arrival, names)

    it.fills.forget()
    it.fills.note_filled(fill, 0, ["host"] * 3)
    it.fills.end(fill)

    assert it.num_cached(names) == 0
    assert it.cache.pool.num_free == 8


def test_a_fill_that_lands_after_its_request_started_counts_no_tokens_for_it() -> None:
    it = Filling()
    arrival = it.arrival()
    fill = it.begin(arrival, arrival.kv.block_hashes)

    arrival.kv.block_tables = ([],)
    it.fills.note_filled(fill, 0, ["host"] * 3)
    it.fills.end(fill)

    assert it.num_cached(arrival.kv.block_hashes) == 3
    assert arrival.tokens_by_source(num_cached=6) == {}


def test_the_first_fill_of_a_block_is_found_until_its_deadline() -> None:
    it, index = Filling(), FillsByName()
    first = it.begin(None, [b"a", b"b"])
    second = it.begin(None, [b"b", b"c"], now=MAX_WAIT_S - 0.1)
    index.add(first)
    index.add(second)
    found_early = index.find([b"x", b"b"])
    late = it.begin(None, [b"b"], now=MAX_WAIT_S)
    index.add(late)

    assert found_early is first
    assert index.find([b"b"]) is late
    index.remove(first)
    assert index.find([b"a"]) is None
    assert index.num_leading(second, [b"c", b"b"]) == 1
