"""Grants of blocks for remote KV, and scheduling of landed requests."""

from __future__ import annotations

import random
from functools import partial

from baton.core.ids import HandoffId, RequestId
from baton.core.output import FinishReason
from baton.engine.scheduler.config import SchedulerConfig
from tests.support.engine_world import EngineWorld

_config = partial(SchedulerConfig, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


class _NoneConfirmed(random.Random):
    """Source of randomness that rejects all draft tokens."""

    def randint(self, a: int, b: int) -> int:
        return a


def test_a_grant_leaves_a_free_block_for_each_request_that_holds_blocks() -> None:
    world = EngineWorld(_config(), num_blocks=6, block_size=4)
    running = world.add([9] * 7, max_tokens=9)
    world.step()

    # Four blocks are free and one request runs: three may be granted, but not four.
    large, small = world.add(16, receives=True, max_tokens=2), world.add(8, receives=True)
    plan = world.step()
    assert plan.kv_orders.receives == ()

    world.abort(large)
    plan = world.step()
    assert [order.handoff_id for order in plan.kv_orders.receives] == [_handoff(small)]
    world.run_to_end()
    assert world.finish_reason(running) is FinishReason.LENGTH


def test_an_idle_engine_grants_all_cache_blocks() -> None:
    world = EngineWorld(_config(remote_headroom_blocks=2), num_blocks=4, block_size=4)
    world.add(15, receives=True, max_tokens=2)

    (order,) = world.step().kv_orders.receives

    assert len(order.block_ids) == 4
    world.run_to_end()


def test_grants_are_limited_to_the_next_batch() -> None:
    world = EngineWorld(_config(max_num_seqs=2))
    for _ in range(3):
        world.add(3, receives=True)

    assert len(world.step().kv_orders.receives) == 2
    world.run_to_end()


def test_kv_lands_while_the_batch_is_full() -> None:
    world = EngineWorld(_config(max_num_seqs=1))
    world.add([9] * 3, max_tokens=9)
    world.step()

    world.add(3, receives=True)

    assert len(world.step().kv_orders.receives) == 1
    world.run_to_end()


def test_landed_requests_without_free_blocks_do_not_deadlock() -> None:
    """All requests have full block tables, and nothing runs that could be preempted."""
    world = EngineWorld(_config(remote_headroom_blocks=0), num_blocks=4, block_size=4)
    names = [world.add([n] * 8, receives=True, max_tokens=5) for n in range(2)]
    world.step()
    for name in names:
        world.wire.land(_handoff(name))

    world.step()
    plan = world.step()

    assert [row.request_id for row in plan.started] == names[:1]
    world.run_to_end()


def test_a_landed_request_waits_for_a_batch_slot() -> None:
    world = EngineWorld(_config(max_num_seqs=1))
    ready = _make_ready_behind_another(world)

    plan = world.step()

    assert ready not in plan.num_scheduled_tokens
    assert world.scheduler.stats().num_ready == 1
    world.run_to_end()


def test_a_landed_request_is_scheduled_before_one_without_blocks() -> None:
    world = EngineWorld(_config(max_num_seqs=1))
    ready = _make_ready_behind_another(world)
    waiting = world.add([3, 3, 3])

    order = [row.request_id for _ in range(20) for row in world.step().started]

    assert order == [ready, waiting]
    world.run_to_end()


def test_a_landed_request_does_not_wait_for_draft_token_slots() -> None:
    """With those slots it would need two blocks, and one is free."""
    config = _config(num_lookahead_tokens=3, remote_headroom_blocks=0)
    world = EngineWorld(config, num_blocks=9, block_size=2, chance=_NoneConfirmed())
    world.add([9] * 3, max_tokens=8)  # five blocks at most
    ready = world.add(6, receives=True, max_tokens=5)
    world.step_until(lambda _: world.scheduler.stats().num_free_blocks == 1)
    world.wire.land(_handoff(ready))
    world.step()

    plan = world.step()

    assert [row.request_id for row in plan.started] == [ready]
    assert world.scheduler.stats().total_preemptions == 0
    world.run_to_end()


def test_a_landed_request_does_not_wait_for_a_long_prefill_in_progress() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=4))
    name = world.add(3, receives=True)
    world.step()
    long = world.add([9] * 20)
    world.step()
    world.wire.land(_handoff(name))
    world.step()

    plan = world.step()

    assert plan.num_scheduled_tokens == {name: 1, long: 3}
    world.run_to_end()


def test_a_running_request_can_preempt_a_landed_one() -> None:
    world = EngineWorld(_config(max_num_seqs=1), num_blocks=5, block_size=4)
    running = world.add([9] * 7, max_tokens=10)
    world.step()
    ready = world.add(8, receives=True, max_tokens=2)
    world.step()
    world.wire.land(_handoff(ready))

    world.run_to_end()

    assert world.finish_reason(running) is FinishReason.LENGTH
    assert world.finish_reason(ready) is FinishReason.LENGTH


def test_a_grant_uses_no_token_budget_and_no_batch_slot() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=4, max_num_seqs=1))
    local = world.add(4)
    receiver = world.add([9] * 12, receives=True)

    plan = world.step()

    assert plan.num_scheduled_tokens == {local: 4}
    assert [order.handoff_id for order in plan.kv_orders.receives] == [_handoff(receiver)]
    world.run_to_end()


def _handoff(name: RequestId) -> HandoffId:
    return HandoffId(name, 1)


def _make_ready_behind_another(world: EngineWorld) -> RequestId:
    """Land a request while the only place in the batch is taken."""
    world.add([9] * 3, max_tokens=6)
    world.step()
    ready = world.add(3, receives=True)
    world.step()
    world.wire.land(_handoff(ready))
    world.step()
    return ready
