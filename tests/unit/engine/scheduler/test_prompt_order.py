"""Order of prompts: urgent and short ones next to a long one in progress."""

from __future__ import annotations

from functools import partial

import pytest

from baton.core.ids import RequestId
from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from tests.support.engine_world import EngineWorld

_config = partial(
    SchedulerConfig,
    max_num_batched_tokens=32,
    max_num_seqs=8,
    max_model_len=1000,
    policy=SchedulingPolicy.PRIORITY,
    long_prefill_token_threshold=8,
    max_long_partial_prefills=1,
)
_World = partial(EngineWorld, num_blocks=400)
LONG = [3] * 600


def steps_until_first_token(world: EngineWorld, request_id: RequestId) -> int:
    for count in range(1, 100):
        world.step()
        if world.tokens(request_id):
            return count
    raise AssertionError(f"{request_id} got no token in 100 steps")


def test_an_urgent_long_prompt_does_not_wait_for_a_lax_one_in_progress() -> None:
    world = _World(_config())
    world.add(LONG, priority=1)
    world.step()
    urgent = world.add([4] * 32)

    assert steps_until_first_token(world, urgent) == 1
    world.run_to_end()


def test_an_urgent_prompt_preempts_while_a_long_one_ahead_of_it_is_set_aside() -> None:
    world = _World(_config(max_num_seqs=3))
    world.add(LONG, priority=0)
    world.add([5] * 4, priority=2, max_tokens=90)
    world.step()
    world.add([6] * 100, priority=0)
    world.step()  # it waits for the other long one
    world.add([7] * 4, priority=2, max_tokens=90)
    world.step()  # the batch is full
    urgent = world.add([4] * 4, priority=1)

    assert steps_until_first_token(world, urgent) == 2
    world.run_to_end()


@pytest.mark.parametrize("num_batched_tokens", [8, 4])
def test_a_short_prompt_passes_a_long_one_that_could_use_the_whole_step(
    num_batched_tokens: int,
) -> None:
    world = _World(_config(max_num_batched_tokens=num_batched_tokens, max_num_seqs=4))
    world.add(LONG)
    world.step()
    short = world.add([4] * 4)

    assert steps_until_first_token(world, short) == 8 / num_batched_tokens
    world.run_to_end()


@pytest.mark.parametrize("max_long_partial_prefills", [None, 1])
def test_short_prompts_pass_long_ones_that_the_partial_prefill_limit_holds_up(
    max_long_partial_prefills: int | None,
) -> None:
    config = _config(
        max_num_partial_prefills=1, max_long_partial_prefills=max_long_partial_prefills
    )
    world = _World(config)
    world.add([5] * 4)  # another one may follow: steps are kept small
    world.step()
    world.add(LONG)
    world.step()
    world.add([6] * 300)
    shorts = [world.add([7 + n] * 8) for n in range(2)]

    assert [steps_until_first_token(world, short) for short in shorts] == [1, 1]
    world.run_to_end()


def test_a_long_prompt_gets_half_of_each_step_while_short_ones_keep_arriving() -> None:
    world = _World(_config(max_num_batched_tokens=16, max_long_partial_prefills=1))
    long = world.add([3] * 64)
    for number in range(9):
        world.add([number] * 8, max_tokens=1)
        world.add([number + 1] * 8, max_tokens=1)
        world.step()

    assert world.tokens(long)
    world.run_to_end()


def test_a_single_token_per_step_goes_to_short_prompts_first() -> None:
    world = _World(_config(max_num_batched_tokens=2, max_num_seqs=2, max_model_len=99))
    world.add([5] * 2, max_tokens=40)
    world.step()
    long = world.add([3] * 20, max_tokens=1)
    world.step()

    assert steps_until_first_token(world, long) == 19
    world.run_to_end()
