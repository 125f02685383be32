"""Prefix hits: what is found, what must be computed all the same, what is never found."""

from __future__ import annotations

from functools import partial

from engine.events import AllBlocksCleared, BlockRemoved, BlockStored
from engine.hashing import block_hashes, root_hash
from engine.request import RequestId
from engine.sampling import SamplingParams
from engine.scheduler_config import SchedulerConfig
from tests.support.engine_world import EngineWorld

_config = partial(SchedulerConfig, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


def test_a_repeated_prompt_computes_only_what_is_not_cached() -> None:
    world = _world_that_served(list(range(10)))

    again = world.add(list(range(10)))
    world.run_to_end()

    assert world.runner.num_computed[again] == 2 + 3  # of the prompt, and while decoding


def test_of_a_prompt_cached_to_its_end_the_last_block_is_computed_again() -> None:
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


def test_output_tokens_are_cached_as_well() -> None:
    world = _world_that_served([1, 2, 3], max_tokens=9)
    answer = world.tokens(RequestId("r0"))

    world.add([1, 2, 3, *answer])

    (row,) = world.step().started
    assert row.num_computed_tokens == 8
    world.run_to_end()


def test_requests_that_run_together_share_blocks() -> None:
    world = EngineWorld(_config(), block_size=4)
    world.add(9, max_tokens=9)
    world.step()
    world.add(9, max_tokens=9)
    world.step()

    assert world.scheduler.stats().num_free_blocks == world.cache_config.num_blocks - 4
    world.run_to_end()


def test_another_salt_never_shares() -> None:
    world = _world_that_served(list(range(10)))

    world.add(list(range(10)), cache_salt="tenant")

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_equal_tokens_behind_another_past_are_not_hit() -> None:
    world = _world_that_served([1, 2, 3, 4, 5, 6, 7, 8])

    world.add([9, 9, 9, 9, 5, 6, 7, 8, 1])

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_switched_off_nothing_is_hit_and_nothing_told() -> None:
    world = EngineWorld(_config(), enable_prefix_caching=False)
    world.add(10)
    world.run_to_end()

    world.add(10)

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    assert world.scheduler.take_kv_events() == ()
    world.run_to_end()


def test_prompt_logprobs_need_every_token_computed() -> None:
    world = _world_that_served(list(range(10)))

    world.add(list(range(10)), sampling=SamplingParams(prompt_logprobs=0))

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_after_a_reset_nothing_old_is_hit() -> None:
    world = _world_that_served(list(range(10)))

    world.scheduler.reset_prefix_cache()
    world.add(list(range(10)))

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_a_request_under_way_at_a_reset_goes_on_but_is_not_cached() -> None:
    world = EngineWorld(_config(), block_size=4)
    world.add(6, max_tokens=9)
    world.step()

    world.scheduler.reset_prefix_cache()
    world.run_to_end()
    world.add(6)

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_what_a_failed_request_touched_is_not_hit_again() -> None:
    world = _world_that_served(list(range(10)))
    bad = world.add(list(range(10)))
    world.fail_next_token(bad)
    world.step()

    world.add(list(range(10)))

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_hit_statistics_count_tokens_asked_for_and_found() -> None:
    world = _world_that_served(list(range(10)))
    world.add(list(range(10)))
    world.run_to_end()

    stats = world.scheduler.stats()

    assert (stats.total_prefix_query_tokens, stats.total_prefix_hit_tokens) == (20, 8)


def test_events_tell_what_can_be_hit_by_the_hashes_that_anyone_can_compute() -> None:
    world = EngineWorld(_config(), block_size=4)
    world.add(list(range(9)), max_tokens=1)
    world.run_to_end()

    hashes = block_hashes(range(8), 4, root_hash(0, "", ""))
    stored = BlockStored(tuple(hashes), None, tuple(range(8)), 4)
    assert world.scheduler.take_kv_events() == (stored,)
    assert world.scheduler.take_kv_events() == ()


def test_events_chain_what_a_request_adds_to_what_it_had() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=4), block_size=4)
    world.add(list(range(8)), max_tokens=1)
    world.run_to_end()

    first, second = world.scheduler.take_kv_events()

    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[0]
    assert second.token_ids == (4, 5, 6, 7)


def test_events_tell_of_eviction_and_reset() -> None:
    world = EngineWorld(_config(), num_blocks=2, block_size=4)
    world.add([1] * 4, max_tokens=1)
    world.run_to_end()
    world.add([2] * 8, max_tokens=1)
    world.run_to_end()
    world.scheduler.reset_prefix_cache()

    stored, removed, other, cleared = world.scheduler.take_kv_events()

    assert isinstance(stored, BlockStored)
    assert removed == BlockRemoved(stored.block_hashes)
    assert isinstance(other, BlockStored)
    assert cleared == AllBlocksCleared()


def _world_that_served(prompt: list[int], max_tokens: int = 4) -> EngineWorld:
    """Blocks of four tokens, in which this prompt and its answer are cached."""
    world = EngineWorld(_config(), block_size=4)
    world.add(prompt, max_tokens=max_tokens)
    world.run_to_end()
    return world
