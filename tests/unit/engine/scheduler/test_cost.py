"""Cost of a scheduler step in function calls: constant where it must be."""

from __future__ import annotations

from functools import partial

import pytest

from baton.core.ids import RequestId
from baton.engine.kv_cache.groups import CacheConfig, CacheLayout
from baton.engine.plan import RunResult
from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from baton.engine.scheduler.scheduler import Scheduler
from tests.support.function_calls import count_calls
from tests.support.requests import make_engine_request

NUM_RUNNING = 8


def test_the_cost_of_a_step_does_not_depend_on_the_queue_length() -> None:
    short_queue, long_queue = _decoding(num_waiting=1), _decoding(num_waiting=500)

    assert count_calls(partial(_step, long_queue)) == count_calls(partial(_step, short_queue))


def test_the_cost_of_a_step_does_not_depend_on_context_lengths() -> None:
    short, long = _decoding(num_prompt_tokens=16), _decoding(num_prompt_tokens=1024)

    costs = [
        [count_calls(partial(_step, scheduler)) for _ in range(16)] for scheduler in (short, long)
    ]

    assert costs[0] == costs[1]


def test_a_decoding_request_costs_at_most_eightcount_calls() -> None:
    few, many = _decoding(num_running=8), _decoding(num_running=72)

    per_request = (count_calls(partial(_step, many)) - count_calls(partial(_step, few))) / 64

    assert per_request <= 8


@pytest.mark.parametrize("num_running", [8, 72])
def test_a_recurrent_state_adds_no_calls_per_decoding_request(num_running: int) -> None:
    with_state = _decoding(num_running=num_running, num_state_blocks=4)
    without = _decoding(num_running=num_running)

    extra = {
        count_calls(partial(_step, with_state)) - count_calls(partial(_step, without))
        for _ in range(9)
    }

    assert extra == {7}  # for the whole batch


def test_the_cost_of_removing_a_request_does_not_depend_on_the_queue_length() -> None:
    short_queue, long_queue = _decoding(num_waiting=3), _decoding(num_waiting=501)
    middle = [RequestId(f"r{NUM_RUNNING + n}") for n in (1, 250)]

    costs = [
        count_calls(partial(scheduler.abort, name))
        for scheduler, name in zip((short_queue, long_queue), middle, strict=True)
    ]

    assert costs[0] == costs[1]


def test_a_head_that_no_preemption_helps_is_looked_up_once() -> None:
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=8192,
            max_num_seqs=80,
            max_model_len=2048,
            policy=SchedulingPolicy.PRIORITY,
        ),
        CacheConfig(num_blocks=480),
    )
    for number in range(64):
        prompt, is_lax = (number, *range(100)), number % 8 == 0
        scheduler.add(
            make_engine_request(
                prompt, request_id=f"r{number}", max_tokens=9, priority=1 if is_lax else 0
            )
        )
    _step(scheduler)
    cost_without = count_calls(partial(_step, scheduler))
    # It needs 100 blocks: 32 are free, and those of lower priority hold 56.
    scheduler.add(make_engine_request(range(1600), request_id="head", max_tokens=2))
    _step(scheduler)
    _step(scheduler)

    cost = count_calls(partial(_step, scheduler))

    assert scheduler.stats().num_waiting == 1
    assert cost - cost_without < 64


def _decoding(
    *,
    num_running: int = NUM_RUNNING,
    num_waiting: int = 0,
    num_prompt_tokens: int = 16,
    num_state_blocks: int = 0,
) -> Scheduler:
    """Return a scheduler with a full decoding batch, in the middle of its blocks, and a queue."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=num_running * num_prompt_tokens,
            max_num_seqs=num_running,
            max_model_len=2048,
        ),
        CacheConfig(
            num_blocks=num_running * 128, layout=CacheLayout(num_state_blocks=num_state_blocks)
        ),
    )
    for number in range(num_running + num_waiting):
        prompt = (number, *range(num_prompt_tokens - 1))
        scheduler.add(make_engine_request(prompt, request_id=f"r{number}", max_tokens=100))
    for _ in range(3):
        _step(scheduler)
    return scheduler


def _step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule(0.0)
    answers = {request_id: [1] for request_id in plan.num_scheduled_tokens}
    scheduler.update(plan, RunResult(answers))
