"""Prefix caching: hits, tokens that are recomputed nevertheless, and isolation."""

from __future__ import annotations

from functools import partial

import pytest

from baton.core.ids import AdapterRef, PrefixKeys, RequestId
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.sampling import SamplingParams
from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored
from baton.engine.kv_cache.block_hashes import PrefixNaming, block_hashes
from baton.engine.scheduler.config import SchedulerConfig
from tests.support.engine_world import EngineWorld

_config = partial(SchedulerConfig, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


def test_a_repeated_prompt_computes_only_uncached_tokens() -> None:
    world = _world_that_served(list(range(10)))

    again = world.add(list(range(10)))
    world.run_to_end()

    assert world.runner.num_computed[again] == 2 + 3  # of the prompt, and while decoding


def test_a_fully_cached_prompt_recomputes_its_last_block() -> None:
    world = _world_that_served(list(range(8)), max_tokens=4)

    world.add(list(range(8)))

    (row,) = world.step().started
    assert row.num_computed_tokens == 4
    world.run_to_end()


def test_a_prompt_one_token_longer_than_its_cached_blocks_computes_that_token() -> None:
    world = _world_that_served(list(range(8)), max_tokens=4)

    name = world.add([*range(8), 5])

    assert world.step().num_scheduled_tokens == {name: 1}
    world.run_to_end()


def test_output_tokens_are_cached() -> None:
    world = _world_that_served([1, 2, 3], max_tokens=9)
    answer = world.tokens(RequestId("r0"))

    world.add([1, 2, 3, *answer])

    (row,) = world.step().started
    assert row.num_computed_tokens == 8
    world.run_to_end()


def test_a_request_short_of_a_block_starts_once_its_prefix_is_cached() -> None:
    """It needs 31 of 60 blocks and 30 are free; once the other prompt is cached it needs 2."""
    config = _config(max_num_batched_tokens=256, max_model_len=256)
    world = EngineWorld(config, num_blocks=60, block_size=4)
    running = world.add(120, max_tokens=100)
    waiting = world.add([*(n % 11 for n in range(116)), *[9] * 8], max_tokens=2)
    first = world.step()

    second = world.step()

    assert list(first.num_scheduled_tokens) == [running]
    assert second.num_scheduled_tokens == {running: 1, waiting: 8}
    world.run_to_end()


def test_a_receiver_short_of_a_block_is_granted_once_its_prefix_is_cached() -> None:
    config = _config(max_num_batched_tokens=256, max_model_len=256, remote_headroom_blocks=0)
    world = EngineWorld(config, num_blocks=60, block_size=4)
    world.add(120, max_tokens=100)
    world.add([*(n % 11 for n in range(116)), *[9] * 8], max_tokens=2, receives=True)
    first = world.step()

    second = world.step()

    assert not first.kv_orders.receives
    assert [len(order.block_ids) for order in second.kv_orders.receives] == [2]
    world.run_to_end()


def test_requests_that_run_together_share_blocks() -> None:
    world = EngineWorld(_config(), block_size=4)
    world.add(9, max_tokens=9)
    world.step()
    world.add(9, max_tokens=9)
    world.step()

    assert world.scheduler.stats().num_free_blocks == world.cache_config.num_blocks - 4
    world.run_to_end()


@pytest.mark.parametrize("sends", [False, True])
def test_the_blocks_of_a_released_request_are_evicted_first(sends: bool) -> None:
    world = EngineWorld(_config(), num_blocks=10, block_size=4)
    for tail, hints in ((1, NO_KV_HINTS), (2, KvHints(release=True))):
        world.add([tail] * 13, max_tokens=2, sends=sends, kv_hints=hints)
        world.run_to_end()

    world.add([3] * 13, max_tokens=2)  # takes the four blocks that are not cached
    world.run_to_end()
    world.add([4] * 9, max_tokens=2)  # takes three, of which one is not cached
    world.run_to_end()

    assert [_num_cached(world, [tail] * 12) for tail in (1, 2, 3)] == [3, 1, 3]


def test_a_prefix_that_another_request_uses_is_not_evicted_first() -> None:
    world = EngineWorld(_config(), num_blocks=10, block_size=4)
    world.add([1] * 13, max_tokens=2)
    world.run_to_end()
    world.add([2] * 13, max_tokens=3, kv_hints=KvHints(release=True))
    world.step()
    world.add([2] * 13, max_tokens=4)
    world.run_to_end()
    for tail in (3, 4):
        world.add([tail] * 9, max_tokens=2)
        world.run_to_end()

    assert [_num_cached(world, [tail] * 12) for tail in (1, 2)] == [1, 3]


def test_prompts_with_different_salts_share_no_blocks() -> None:
    world = _world_that_served(list(range(10)))

    world.add(list(range(10)), cache_salt="tenant")

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_equal_tokens_after_a_different_prefix_are_no_prefix_hits() -> None:
    world = _world_that_served([1, 2, 3, 4, 5, 6, 7, 8])

    world.add([9, 9, 9, 9, 5, 6, 7, 8, 1])

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_without_prefix_caching_there_are_no_hits_and_no_events() -> None:
    world = EngineWorld(_config(), enable_prefix_caching=False)
    world.add(10)
    world.run_to_end()

    world.add(10)

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    assert world.take_kv_events() == ()
    world.run_to_end()


def test_requests_with_prompt_logprobs_use_no_prefix_hits() -> None:
    world = _world_that_served(list(range(10)))

    world.add(list(range(10)), sampling=SamplingParams(prompt_logprobs=0))

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_a_reset_removes_all_prefix_hits() -> None:
    world = _world_that_served(list(range(10)))

    world.scheduler.reset_prefix_cache()
    world.add(list(range(10)))

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_a_running_request_continues_after_a_reset_but_is_not_cached() -> None:
    world = EngineWorld(_config(), block_size=4)
    world.add(6, max_tokens=9)
    world.step()

    world.scheduler.reset_prefix_cache()
    world.run_to_end()
    world.add(6)

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_blocks_of_a_failed_request_are_no_prefix_hits() -> None:
    world = _world_that_served(list(range(10)))
    bad = world.add(list(range(10)))
    world.fail_next_token(bad)
    world.step()

    world.add(list(range(10)))

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_hit_statistics_count_queried_and_cached_tokens() -> None:
    world = _world_that_served(list(range(10)))
    world.add(list(range(10)))
    world.run_to_end()

    stats = world.scheduler.stats()

    assert (stats.total_prefix_query_tokens, stats.total_prefix_hit_tokens) == (20, 8)


def test_events_name_cached_blocks_by_reproducible_hashes() -> None:
    world = EngineWorld(_config(), block_size=4)
    world.add(list(range(9)), max_tokens=1)
    world.run_to_end()

    hashes = block_hashes(range(8), 4, PrefixNaming(4).root())
    stored = BlockStored(tuple(hashes), None, tuple(range(8)), 4, PrefixNaming(4).root())
    assert world.take_kv_events() == (stored,)
    assert world.take_kv_events() == ()


def test_events_name_the_adapter_that_computed_the_blocks() -> None:
    world = EngineWorld(_config(max_loras=1), block_size=4)
    world.add(list(range(9)), max_tokens=1, adapter="a")
    world.run_to_end()

    [stored] = world.take_kv_events()

    assert isinstance(stored, BlockStored)
    assert stored.adapter == AdapterRef("a", "a")
    assert stored.root_hash == PrefixNaming(4).root(PrefixKeys(adapter="a"))


def test_events_name_the_parent_of_the_added_blocks() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=4), block_size=4)
    world.add(list(range(8)), max_tokens=1)
    world.run_to_end()

    first, second = world.take_kv_events()

    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[0]
    assert second.token_ids == (4, 5, 6, 7)


def test_events_include_evictions_and_resets() -> None:
    world = EngineWorld(_config(), num_blocks=2, block_size=4)
    world.add([1] * 4, max_tokens=1)
    world.run_to_end()
    world.add([2] * 8, max_tokens=1)
    world.run_to_end()
    world.scheduler.reset_prefix_cache()

    stored, removed, other, cleared = world.take_kv_events()

    assert isinstance(stored, BlockStored)
    assert removed == BlockRemoved(stored.block_hashes)
    assert isinstance(other, BlockStored)
    assert cleared == AllBlocksCleared()


def _world_that_served(prompt: list[int], max_tokens: int = 4) -> EngineWorld:
    """Return a world with blocks of four tokens that caches this prompt and its answer."""
    world = EngineWorld(_config(), block_size=4)
    world.add(prompt, max_tokens=max_tokens)
    world.run_to_end()
    return world


def _num_cached(world: EngineWorld, prompt: list[int]) -> int:
    """Return the number of leading blocks of the prompt that are cached, without using them."""
    names = block_hashes(prompt, 4, PrefixNaming(4).root())
    return len(world.scheduler._state.cache.pool.find(names))
