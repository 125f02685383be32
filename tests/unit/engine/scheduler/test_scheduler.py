"""Scheduler, step by step: budget, batch size, limits and order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from baton.core.errors import InvalidRequest
from baton.core.output import FinishReason, Output
from baton.engine.errors import OutOfOrder
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from baton.engine.scheduler.prompt_budget import NUM_STEPS_AFTER_SHORT
from baton.engine.scheduler.scheduler import Scheduler
from tests.support.engine_world import EngineWorld
from tests.support.requests import make_engine_request
from tests.support.scheduler_state import is_idle

_config = partial(SchedulerConfig, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


def test_one_request_is_prefilled_and_decoded_to_its_end() -> None:
    world = EngineWorld()
    name = world.add(6, max_tokens=3)

    plans = [world.step() for _ in range(3)]

    assert [plan.num_scheduled_tokens for plan in plans] == [{name: 6}, {name: 1}, {name: 1}]
    assert world.finish_reason(name) is FinishReason.LENGTH
    assert world.step().dropped == (name,)
    world.run_to_end()


def test_a_row_starts_with_its_full_state_and_later_plans_carry_deltas() -> None:
    world = EngineWorld(block_size=4)
    name = world.add([1, 2, 3, 4, 5], prior=[6], max_tokens=9)

    first, second, third, fourth = (world.step() for _ in range(4))

    (row,) = first.started
    assert row.token_ids == (1, 2, 3, 4, 5, 6)
    assert (row.num_prompt_tokens, row.num_computed_tokens) == (5, 0)
    assert row.block_tables == ((0, 1),)
    assert first.new_block_ids == {}
    assert (second, third) == (Plan(num_scheduled_tokens={name: 1}),) * 2
    assert fourth.new_block_ids == {name: ((2,),)}
    world.run_to_end()


def test_a_plan_does_not_change_after_it_was_made() -> None:
    world = EngineWorld()
    name = world.add(max_tokens=9)
    world.step()
    plan = world.step()

    world.abort(name)
    world.add()
    world.step()

    assert plan == Plan(num_scheduled_tokens={name: 1})
    world.run_to_end()


# --- budget and limits ------------------------------------------------------------


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=4))
    name = world.add(10)

    chunks = [world.step().num_scheduled_tokens[name] for _ in range(3)]

    assert chunks == [4, 4, 2]
    assert len(world.tokens(name)) == 1
    world.run_to_end()


def test_decoding_requests_are_scheduled_before_prompts() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=5, max_num_seqs=3))
    decoding = world.add(2, max_tokens=9)
    world.step()
    long = world.add(12)

    plan = world.step()

    assert plan.num_scheduled_tokens == {decoding: 1, long: 4}
    world.run_to_end()


def test_the_budget_left_by_a_prompt_goes_to_the_next() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=8), enable_prefix_caching=False)
    first, second = world.add(5), world.add(6)

    plan = world.step()

    assert plan.num_scheduled_tokens == {first: 5, second: 3}
    world.run_to_end()


def test_at_most_max_num_seqs_requests_run() -> None:
    world = EngineWorld(_config(max_num_seqs=2))
    names = [world.add(3, max_tokens=2) for _ in range(3)]

    first, second = world.step(), world.step()
    third = world.step()

    assert list(first.num_scheduled_tokens) == list(second.num_scheduled_tokens) == names[:2]
    assert list(third.num_scheduled_tokens) == names[2:]
    world.run_to_end()


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_takes_it_whole() -> None:
    config = _config(max_num_batched_tokens=6, enable_chunked_prefill=False)
    world = EngineWorld(config, enable_prefix_caching=False)
    first, second = world.add(4, max_tokens=2), world.add(5)

    plans = [world.step().num_scheduled_tokens for _ in range(2)]

    assert plans == [{first: 4}, {first: 1, second: 5}]
    world.run_to_end()


def test_no_chunk_is_longer_than_the_long_prefill_threshold() -> None:
    world = EngineWorld(_config(long_prefill_token_threshold=3))
    long, short = world.add(8), world.add([9, 9])

    plan = world.step()

    assert plan.num_scheduled_tokens == {long: 3, short: 2}
    world.run_to_end()


def test_partial_prefills_stay_within_their_limit() -> None:
    config = _config(
        max_num_batched_tokens=6, long_prefill_token_threshold=3, max_num_partial_prefills=1
    )
    world = EngineWorld(config, enable_prefix_caching=False)
    first, second = world.add(7), world.add(7)

    plans = [world.step().num_scheduled_tokens for _ in range(3)]

    assert plans == [{first: 6}, {first: 1, second: 5}, {first: 1, second: 2}]
    world.run_to_end()


def test_a_prompt_that_is_done_in_one_step_is_no_partial_prefill() -> None:
    config = _config(long_prefill_token_threshold=3, max_num_partial_prefills=1)
    world = EngineWorld(config, enable_prefix_caching=False)
    long, short = world.add(7), world.add(3)

    plan = world.step()

    assert plan.num_scheduled_tokens == {long: 3, short: 3}
    world.run_to_end()


def test_short_prompts_overtake_long_ones_beyond_the_limit_of_long_prefills() -> None:
    config = _config(long_prefill_token_threshold=3, max_long_partial_prefills=1)
    world = EngineWorld(config, enable_prefix_caching=False)
    first_long, second_long, short = world.add(6), world.add(6), world.add(2)

    plans = [world.step().num_scheduled_tokens for _ in range(3)]

    assert plans[0] == {first_long: 3, short: 2}
    # The first long prompt ends in this step, so the second may begin.
    assert plans[1] == {first_long: 3, short: 1, second_long: 3}
    assert plans[2][second_long] == 3
    world.run_to_end()


def test_long_prompts_get_the_budget_that_short_prompts_leave() -> None:
    """Eight prompts of 4,096 tokens take steps of 2,048, minus the decoding requests' tokens."""
    config = SchedulerConfig(long_prefill_token_threshold=512, max_long_partial_prefills=1)
    world = EngineWorld(config, num_blocks=2100, block_size=16, enable_prefix_caching=False)
    names = [world.add(4096, max_tokens=40) for _ in range(8)]

    num_steps = 0
    while not all(world.tokens(name) for name in names):
        num_tokens = sum(world.step().num_scheduled_tokens.values())
        num_steps += 1
        assert num_tokens == 2048 or num_steps == 17

    assert num_steps == 17
    world.run_to_end()


def test_short_prompts_get_the_budget_before_further_chunks_of_long_ones() -> None:
    config = _config(
        max_num_batched_tokens=12, long_prefill_token_threshold=4, max_long_partial_prefills=1
    )
    world = EngineWorld(config, enable_prefix_caching=False)
    long, next_long = world.add(40, max_tokens=1), world.add(6, max_tokens=1)
    alone = world.step().num_scheduled_tokens
    shorts = [world.add(4, max_tokens=1), world.add(3, max_tokens=1)]

    plan = world.step()

    assert alone == {long: 12}
    assert plan.num_scheduled_tokens == {long: 4, shorts[0]: 4, shorts[1]: 3}
    world.run_to_end()
    assert world.tokens(next_long)


def test_steps_stay_small_after_a_short_prompt() -> None:
    """The next short prompt may arrive during a step, and then waits for a small one."""
    config = _config(max_num_batched_tokens=8, long_prefill_token_threshold=1, max_model_len=90)
    world = EngineWorld(config, enable_prefix_caching=False)
    world.add(1, max_tokens=1)
    world.step()
    long = world.add(80, max_tokens=1)

    chunks = [world.step().num_scheduled_tokens[long] for _ in range(NUM_STEPS_AFTER_SHORT + 1)]

    assert chunks == [1] * NUM_STEPS_AFTER_SHORT + [8]
    world.run_to_end()


# --- order ------------------------------------------------------------------------


def test_fcfs_ignores_priorities() -> None:
    world = EngineWorld(_config(max_num_seqs=1))
    first = world.add(3, priority=5)
    world.add(3, priority=0)

    assert list(world.step().num_scheduled_tokens) == [first]
    world.run_to_end()


def test_priority_precedes_arrival_time() -> None:
    world = EngineWorld(_config(max_num_seqs=1, policy=SchedulingPolicy.PRIORITY))
    late, urgent, urgent_too = (world.add(3, priority=p, max_tokens=1) for p in (1, 0, 0))

    order = [list(world.step().num_scheduled_tokens) for _ in range(3)]

    assert order == [[urgent], [urgent_too], [late]]
    world.run_to_end()


def test_equal_priorities_are_ordered_by_arrival_time() -> None:
    scheduler = Scheduler(_config(max_num_seqs=1, policy=SchedulingPolicy.PRIORITY), CacheConfig(8))
    for name, arrival_s in (("late", 2.0), ("early", 1.0)):
        request = make_engine_request(request_id=name)
        scheduler.add(replace(request, arrival_s=arrival_s))

    plan = scheduler.schedule(3.0)

    assert list(plan.num_scheduled_tokens) == ["early"]


# --- turns, ids, statistics--------------------------------------------------------


def test_a_request_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    world = EngineWorld()
    world.add(request_id="same")

    with pytest.raises(InvalidRequest, match="same is in use"):
        world.add(request_id="same")
    world.run_to_end()
    world.add(request_id="same")
    world.run_to_end()


def test_a_refused_request_leaves_no_trace() -> None:
    world = EngineWorld()

    with pytest.raises(InvalidRequest):
        world.add([])

    assert is_idle(world.scheduler)


def test_a_plan_must_be_applied_before_the_next() -> None:
    scheduler = Scheduler(_config(), CacheConfig(8))
    scheduler.schedule(0.0)

    with pytest.raises(OutOfOrder):
        scheduler.schedule(0.0)


def test_a_plan_is_applied_once() -> None:
    scheduler = Scheduler(_config(), CacheConfig(8))
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, RunResult())

    with pytest.raises(OutOfOrder):
        scheduler.update(plan, RunResult())


def test_a_result_without_a_prefilling_request_raises() -> None:
    scheduler = Scheduler(_config(), CacheConfig(8))
    scheduler.add(make_engine_request())

    with pytest.raises(OutOfOrder, match="it got no token"):
        scheduler.update(scheduler.schedule(0.0), RunResult())


def test_a_result_without_a_decoding_request_raises() -> None:
    scheduler = Scheduler(_config(), CacheConfig(8))
    scheduler.add(make_engine_request())
    _answer(scheduler, [5])

    with pytest.raises(OutOfOrder, match="fewer results"):
        scheduler.update(scheduler.schedule(0.0), RunResult())


def test_an_idle_scheduler_makes_empty_plans() -> None:
    scheduler = Scheduler(_config(), CacheConfig(8))

    assert scheduler.schedule(0.0) == Plan()
    assert is_idle(scheduler)
    assert not scheduler.has_work


def test_stats_count_requests_by_status() -> None:
    world = EngineWorld(_config(max_num_seqs=1), num_blocks=8, block_size=4)
    world.add(6)
    world.add(6)
    world.step()

    stats = world.scheduler.stats()

    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_free_blocks, stats.num_blocks) == (6, 8)
    world.run_to_end()


def test_no_state_of_finished_requests_is_kept() -> None:
    world = EngineWorld(_config(max_num_seqs=4), num_blocks=8)
    for number in range(200):
        world.add([number % 7, 1], sends=number % 3 == 0, receives=number % 3 == 1)
        world.step()
        world.wire.settle()

    world.run_to_end()

    assert world.scheduler.request_ids() == ()
    assert world.scheduler.stats().num_pending_sends == 0


def _answer(scheduler: Scheduler, token_ids: list[int]) -> list[Output]:
    """Run one step in which every scheduled request gets these tokens."""
    plan = scheduler.schedule(0.0)
    run = RunResult(dict.fromkeys(plan.num_scheduled_tokens, token_ids))
    return scheduler.update(plan, run)
