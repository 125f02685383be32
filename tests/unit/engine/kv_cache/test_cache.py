"""Block table of a request: admission, growth, registration and release."""

from __future__ import annotations

from dataclasses import replace

from baton.core.media import MediaSegment
from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.cache_group import PrefixHit
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.scheduler.request import Request
from tests.support.requests import make_engine_request, make_held

NO_HIT = PrefixHit(0, ([],))


def test_a_request_gets_blocks_for_all_its_tokens() -> None:
    cache = _cache()
    request = make_held(range(5))

    assert cache.admit(request, NO_HIT)
    assert request.block_ids == [0, 1, 2]
    assert cache.capacity(request) == 6


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    cache = _cache(num_blocks=2)
    request = make_held(range(5))

    assert not cache.admit(request, NO_HIT)
    assert request.block_ids == []
    assert cache.pool.num_free == 2
    assert cache.total_query_tokens == 0


def test_allocation_leaves_the_reserved_blocks_free() -> None:
    cache = _cache(num_blocks=4)

    assert not cache.admit(make_held(range(5)), NO_HIT, spare=2)
    assert cache.admit(make_held(range(5)), NO_HIT, spare=1)


def test_free_blocks_that_are_prefix_hits_do_not_count_as_free() -> None:
    cache = _cache(num_blocks=2)
    _serve(cache, range(4))
    request = make_held([0, 1, 2, 3, 4])
    hit = cache.find_prefix(request, 4)

    assert hit.num_blocks == 2
    assert not cache.admit(request, hit)
    cache.pool.check([])


def test_a_hit_is_cut_to_whole_blocks_within_the_limit() -> None:
    cache = _cache()
    _serve(cache, range(8))

    hits = [cache.find_prefix(make_held(range(8)), limit) for limit in (8, 7, 6, 1)]

    assert [hit.num_blocks for hit in hits] == [4, 3, 3, 0]


def test_growing_allocates_only_missing_blocks() -> None:
    cache = _cache()
    request = make_held(range(3))
    cache.admit(request, NO_HIT)

    assert [cache.grow(request, n) for n in (4, 5, 8)] == [((),), ((2,),), ((3,),)]


def test_growing_beyond_the_pool_changes_nothing() -> None:
    cache = _cache(num_blocks=2)
    request = make_held(range(3))
    cache.admit(request, NO_HIT)

    assert cache.grow(request, 5) is None
    assert request.block_ids == [0, 1]


def test_only_full_computed_blocks_are_registered() -> None:
    cache = _cache()
    request = make_held(range(6))
    cache.admit(request, NO_HIT)
    request.num_computed_tokens = 5

    cache.register(request)

    assert cache.pool.num_cached == 2


def test_already_cached_blocks_are_left_out_of_the_event() -> None:
    cache = _cache(num_blocks=16)
    twins = [make_held(range(6), request_id=name) for name in "ab"]
    for request in twins:
        cache.admit(request, NO_HIT)
    for request, num_computed in ((twins[0], 4), (twins[1], 6)):
        request.num_computed_tokens = num_computed
        cache.register(request)

    events = [event for event in cache.prefixes.take_events() if isinstance(event, BlockStored)]

    assert [event.token_ids for event in events] == [(0, 1, 2, 3), (4, 5)]
    assert events[1].parent_block_hash == events[0].block_hashes[1]


def test_released_blocks_are_free_and_still_cached() -> None:
    cache = _cache()
    request = _serve(cache, range(6))

    assert cache.pool.num_free == cache.pool.num_blocks
    assert (request.block_ids, request.num_computed_tokens) == ([], 0)
    assert cache.find_prefix(make_held(range(6)), 6).num_blocks == 3


def test_the_end_of_a_released_request_is_evicted_first() -> None:
    cache = _cache(num_blocks=3)
    _serve(cache, range(6))

    cache.admit(make_held([9, 9]), NO_HIT)

    assert cache.find_prefix(make_held(range(6)), 6).num_blocks == 2


def test_uncached_blocks_are_no_prefix_hits() -> None:
    cache = _cache()
    request = make_held(range(6))
    cache.admit(request, NO_HIT)
    request.num_computed_tokens = 6
    cache.register(request)

    cache.uncache_blocks(request)
    cache.release(request)

    assert cache.find_prefix(make_held(range(6)), 6) == NO_HIT
    cache.pool.check([])


def test_a_hit_ends_in_front_of_an_image_that_the_cache_has_not_seen() -> None:
    cache = _cache()
    _serve(cache, range(8))
    cat, dog = (_held_with_image(content) for content in b"cd")

    hits = [cache.find_prefix(cat, 8).num_blocks]
    cache.admit(cat, cache.find_prefix(cat, 8))
    cat.num_computed_tokens = cat.num_tokens
    cache.release(cat)
    hits += [cache.find_prefix(held, 8).num_blocks for held in (_held_with_image(b"c"[0]), dog)]

    assert hits == [2, 4, 2]


def test_events_have_token_ids_only_if_they_are_collected() -> None:
    cache = _cache(collect_token_ids=False)
    request = _serve(cache, range(6))

    (event,) = cache.prefixes.take_events()

    assert isinstance(event, BlockStored)
    assert len(event.block_hashes) == 3
    assert event.token_ids == ()
    assert event.root_hash == request.root_hash


def test_events_have_the_pictures_of_blocks_with_their_places() -> None:
    cache = _cache()
    fox, owl = bytes(32), b"o" * 32
    # Two rows of one picture, with a token of text in between; then another, and the first again.
    media = (
        MediaSegment(3, 2, fox),
        MediaSegment(6, 1, fox, first=2),
        MediaSegment(7, 1, owl),
        MediaSegment(9, 3, fox),
    )
    held = _held_with(media, num_tokens=14)
    cache.admit(held, NO_HIT)
    held.num_computed_tokens = held.num_tokens
    cache.release(held)

    [event] = cache.prefixes.take_events()

    assert isinstance(event, BlockStored)
    assert event.pictures == (
        (),
        ((fox, 1),),
        ((fox, -1),),
        ((fox, -3), (owl, 1)),
        ((fox, 1),),
        ((fox, -1),),
        (),
    )


def test_resets_and_evictions_create_events() -> None:
    cache = _cache(num_blocks=3)
    request = _serve(cache, range(6))
    hashes = list(request.block_hashes)
    cache.prefixes.take_events()

    cache.admit(make_held([9, 9]), NO_HIT)
    cache.reset([])

    assert cache.prefixes.take_events() == (BlockRemoved((hashes[2],)), AllBlocksCleared())


def _cache(num_blocks: int = 8, *, collect_token_ids: bool = True) -> KvCache:
    return KvCache(
        CacheConfig(
            num_blocks=num_blocks,
            block_size=2,
            collect_events=True,
            collect_token_ids=collect_token_ids,
        )
    )


def _held_with_image(content: int) -> HeldKv:
    """Return the KV of a prompt of eight tokens, of which 5 and 6 stand for an image."""
    return _held_with((MediaSegment(5, 2, bytes([content]) * 32),), num_tokens=8)


def _held_with(media: tuple[MediaSegment, ...], *, num_tokens: int) -> HeldKv:
    submitted = replace(make_engine_request(range(num_tokens)), media=media)
    return Request(submitted, (0, 0.0, 0), PrefixNaming(16).root(), frozenset(), 12).kv


def _serve(cache: KvCache, prompt: range) -> HeldKv:
    """Compute a prompt and release its blocks."""
    request = make_held(prompt, request_id="served")
    cache.admit(request, NO_HIT)
    request.num_computed_tokens = request.num_tokens
    cache.release(request)
    return request
