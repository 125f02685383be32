"""Priority scheduling: order of admission, and preemption for urgent requests."""

from __future__ import annotations

from functools import partial

import pytest

from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from tests.support.engine_world import EngineWorld

_config = partial(
    SchedulerConfig,
    max_num_batched_tokens=64,
    max_num_seqs=4,
    max_model_len=64,
    policy=SchedulingPolicy.PRIORITY,
)


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_a_retried_request_keeps_its_place_by_arrival_time(policy: SchedulingPolicy) -> None:
    world = EngineWorld(_config(policy=policy, max_num_seqs=1))
    world.add(4, arrival_s=1.0, max_tokens=2)
    newer = world.add([9] * 4, arrival_s=2.0, max_tokens=2)
    retried = world.add([8] * 4, arrival_s=3.0, age_s=2.5, prior=[1], max_tokens=3)
    order = [row.request_id for _ in range(8) for row in world.step().started]

    assert order.index(retried) < order.index(newer)
    world.run_to_end()


def test_a_request_of_higher_priority_takes_the_blocks_of_a_running_one() -> None:
    world = EngineWorld(_config(), num_blocks=8, block_size=4)
    kept = world.add(8, priority=1, max_tokens=9)
    lax = world.add([9] * 16, priority=2, max_tokens=9)
    world.step()
    urgent = world.add([7] * 12, max_tokens=2)
    world.step()  # it finds no blocks

    plan = world.step()

    assert plan.dropped == (lax,)
    assert [row.request_id for row in plan.started] == [urgent]
    assert kept in plan.num_scheduled_tokens
    world.run_to_end()


def test_a_request_of_higher_priority_takes_the_batch_slot_of_a_running_one() -> None:
    world = EngineWorld(_config(max_num_seqs=2))
    world.add(4, priority=1, max_tokens=20)
    lax = world.add([9] * 4, priority=2, max_tokens=20)
    world.step()
    urgent = world.add([7] * 4, max_tokens=2)
    world.step()

    plan = world.step()

    assert plan.dropped == (lax,)
    assert [row.request_id for row in plan.started] == [urgent]
    world.run_to_end()


def test_a_receive_of_higher_priority_preempts_running_requests() -> None:
    world = EngineWorld(_config(), num_blocks=8, block_size=4)
    lax = world.add([9] * 20, priority=2, max_tokens=9)
    world.step()
    world.add([7] * 20, receives=True, max_tokens=2)
    world.step()

    plan = world.step()

    assert plan.dropped == (lax,)
    assert [order.handoff_id.request_id for order in plan.kv_orders.receives] == ["r1"]
    world.run_to_end()


def test_no_request_is_preempted_for_a_receive_that_must_wait_for_another_one() -> None:
    world = EngineWorld(_config(max_num_seqs=1), num_blocks=8, block_size=4)
    world.add([9] * 6, priority=2, max_tokens=9)
    world.add([8] * 4, priority=1, receives=True, max_tokens=2)
    world.step()
    world.add([7] * 20, receives=True, max_tokens=2)

    assert [world.step().dropped for _ in range(3)] == [()] * 3
    world.run_to_end()


def test_each_request_is_preempted_for_priority_at_most_once() -> None:
    world = EngineWorld(_config(max_num_seqs=1))
    lax = world.add(4, priority=2, max_tokens=40)
    world.step()
    for n in range(3):
        world.add([n] * 4, max_tokens=2)
    world.step_until(lambda plan: lax in [row.request_id for row in plan.started])
    world.add([9] * 4, max_tokens=2)

    drops = [plan.dropped for plan in (world.step(), world.step(), world.step())]

    assert lax not in sum(drops, ())
    assert world.scheduler.stats().total_preemptions == 1
    world.run_to_end()


def test_no_request_is_preempted_if_its_blocks_do_not_suffice() -> None:
    world = EngineWorld(_config(), num_blocks=8, block_size=4)
    world.add(16, max_tokens=12)
    world.add([9] * 4, priority=2, max_tokens=12)
    world.step()
    world.add([7] * 24, priority=1, max_tokens=2)  # the low-priority request has too few blocks

    for _ in range(3):
        assert world.step().dropped == ()
    world.run_to_end()


def test_equal_priorities_and_fcfs_never_preempt() -> None:
    for policy, priority in ((SchedulingPolicy.PRIORITY, 0), (SchedulingPolicy.FCFS, 2)):
        world = EngineWorld(_config(policy=policy, max_num_seqs=1))
        world.add(4, priority=priority, max_tokens=8)
        world.step()
        world.add([7] * 4, max_tokens=2)

        assert [world.step().dropped for _ in range(3)] == [()] * 3
        world.run_to_end()


def test_a_sender_that_has_sent_blocks_is_not_preempted() -> None:
    config = _config(max_num_seqs=1, max_num_batched_tokens=4)
    world = EngineWorld(config, num_blocks=8, block_size=4)
    world.add(16, priority=2, sends=True)
    world.step_until(lambda plan: plan.kv_orders.sends)
    world.add([7] * 4, max_tokens=2)

    assert [world.step().dropped for _ in range(2)] == [()] * 2
    world.run_to_end()
