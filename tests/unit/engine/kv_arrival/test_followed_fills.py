"""Bursts with a common prefix on a decode node: its blocks are received once."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidConfig
from baton.core.ids import HandoffId, RequestId
from baton.core.output import FinishReason
from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from baton.kv_transfer.types import Receive
from tests.support.engine_world import OTHER_SOURCE, EngineWorld
from tests.support.scheduler_state import is_idle

SHARED = [number % 11 for number in range(7 * 4)]  # seven blocks


def _world(
    num_blocks: int = 256,
    policy: SchedulingPolicy = SchedulingPolicy.FCFS,
    max_fill_wait_s: float = 5.0,
) -> EngineWorld:
    config = SchedulerConfig(
        max_num_seqs=32, max_model_len=200, policy=policy, max_fill_wait_s=max_fill_wait_s
    )
    return EngineWorld(config, num_blocks=num_blocks, block_size=4)


def _two(world: EngineWorld) -> tuple[RequestId, RequestId]:
    """Add a request whose blocks are in flight, and one that waits for them."""
    first = world.add([*SHARED, 1, 1, 1, 1], receives=True)
    second = world.add([*SHARED, 2, 2, 2, 2], receives=True)
    assert _received(world) == {first: (0, 8)}
    return first, second


def _received(world: EngineWorld) -> dict[RequestId, tuple[int, int]]:
    """Run a step; return first block and number of blocks of each hand-off that it begins."""
    return {
        RequestId(order.handoff_id.request_id): (order.first_block, len(order.block_ids))
        for order in world.step().kv_orders.receives
    }


def _end(world: EngineWorld, *names: RequestId) -> None:
    world.run_to_end()
    assert {world.finish_reason(name) for name in names} == {FinishReason.LENGTH}


def test_a_burst_receives_its_common_prefix_once() -> None:
    world = _world()
    prefix = [number % 11 for number in range(30 * 4)]
    tails = [[number % 11, number // 11, *range(14)] for number in range(16)]  # of four blocks
    names = [world.add([*prefix, *(t % 11 for t in tail)], receives=True) for tail in tails]
    received: list[Receive] = []

    while not is_idle(world.scheduler):
        world.wire.settle()
        received += world.step().kv_orders.receives

    assert sum(len(order.block_ids) for order in received) == 30 + 16 * 4  # rather than 16 * 34
    assert [world.runner.num_computed[name] for name in names] == [3] * 16
    _end(world, *names)


def test_a_follower_receives_its_suffix_once_the_prefix_has_landed() -> None:
    world = _world()
    first, second = _two(world)
    plans = [world.step() for _ in range(3)]
    has_work = world.scheduler.has_work

    world.wire.land(HandoffId(first, 1))
    world.step()

    assert all(plan.is_empty for plan in plans)
    assert not has_work
    assert _received(world) == {second: (7, 1)}
    _end(world, first, second)


def test_a_follower_does_not_delay_requests_behind_it() -> None:
    world = _world()
    _two(world)

    other = world.add([9] * 12, receives=True)
    local = world.add([8] * 12)
    plan = world.step()

    assert [order.handoff_id.request_id for order in plan.kv_orders.receives] == [other]
    assert [row.request_id for row in plan.started] == [local]
    world.run_to_end()


def test_a_follower_receives_the_prefix_itself_if_the_fill_is_lost() -> None:
    world = _world()
    first, second = _two(world)

    world.wire.lose(HandoffId(first, 1))
    world.step()

    assert _received(world) == {second: (0, 8)}
    _end(world, first, second)


def test_the_next_request_receives_the_prefix_if_the_first_is_aborted() -> None:
    world = _world()
    first, second = _two(world)
    third = world.add([*SHARED, 3, 3, 3, 3], receives=True)
    world.step()

    world.abort(first)

    assert _received(world) == {second: (0, 8)}
    _end(world, second, third)


def test_a_follower_can_be_aborted() -> None:
    world = _world()
    first, second = _two(world)

    world.abort(second)
    world.step()

    assert world.finish_reason(second) is FinishReason.ABORT
    _end(world, first)


def test_the_wait_times_out_for_all_followers_of_a_burst_at_once() -> None:
    world = _world()
    first, second = _two(world)
    third = world.add([*SHARED, 3, 3, 3, 3], receives=True)
    world.step()

    world.wait(4.9)
    early = _received(world)
    world.wait(0.2)

    assert early == {}
    assert _received(world) == {second: (0, 8), third: (0, 8)}
    _end(world, first, second, third)


def test_with_a_fill_wait_of_zero_each_request_receives_its_prefix_itself() -> None:
    world = _world(max_fill_wait_s=0.0)

    names = [world.add([*SHARED, number], receives=True) for number in range(3)]

    assert _received(world) == dict.fromkeys(names, (0, 8))
    _end(world, *names)
    with pytest.raises(InvalidConfig, match="max_fill_wait_s"):
        _world(max_fill_wait_s=-1.0)


def test_a_burst_on_a_full_cache_finishes() -> None:
    world = _world(num_blocks=9)

    names = [world.add([*SHARED, number, number], receives=True) for number in range(6)]

    _end(world, *names)


# --- not worth the wait, or not safe ------------------------------------------------


def test_no_request_waits_for_a_long_hand_off_to_save_a_few_blocks() -> None:
    world = _world()
    long = world.add([*SHARED, *([5] * 4 * 8)], receives=True)
    short = world.add([*SHARED, 6], receives=True)
    other = world.add([*SHARED, *([6] * 4 * 8)], receives=True)

    assert _received(world).keys() == {long, short, other}
    _end(world, long, short, other)


def test_no_request_waits_for_a_prefix_from_another_peer() -> None:
    world = _world()
    first = world.add([*SHARED, 1], receives=True)
    second = world.add([*SHARED, 2], receives=True, source=OTHER_SOURCE)

    assert _received(world).keys() == {first, second}
    _end(world, first, second)


def test_a_request_does_not_wait_for_a_fill_of_lower_priority() -> None:
    world = _world(policy=SchedulingPolicy.PRIORITY)
    first = world.add([*SHARED, 1], receives=True, priority=1)
    world.step()

    urgent = world.add([*SHARED, 2], receives=True, priority=0)

    assert _received(world).keys() == {urgent}
    _end(world, first, urgent)


def test_prompts_with_different_salts_share_no_fill() -> None:
    world = _world()
    first = world.add([*SHARED, 1], receives=True)
    second = world.add([*SHARED, 2], receives=True, cache_salt="tenant")

    assert _received(world).keys() == {first, second}
    _end(world, first, second)


def test_after_a_cache_reset_no_request_waits_for_a_prefix_in_flight() -> None:
    world = _world()
    first = world.add([*SHARED, 1], receives=True)
    world.step()
    world.scheduler.reset_prefix_cache()

    second = world.add([*SHARED, 2], receives=True)

    assert _received(world).keys() == {second}
    _end(world, first, second)
