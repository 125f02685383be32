"""Places of adapters in the batch: who waits, who passes, and for how long."""

from __future__ import annotations

from functools import partial

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import AdapterRef, RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.scheduler.batch_adapters import BatchAdapters
from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from tests.support.engine_world import EngineWorld

_config = partial(
    SchedulerConfig, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=64, max_loras=2
)
PROMPT = [9] * 4


def started(world: EngineWorld) -> list[RequestId]:
    return [row.request_id for row in world.step().started]


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_a_third_adapter_waits_and_others_pass(policy: SchedulingPolicy) -> None:
    world = EngineWorld(_config(policy=policy))
    first = world.add(PROMPT, adapter="a", max_tokens=3)
    second = world.add(PROMPT, adapter="b", max_tokens=6)
    third = world.add(PROMPT, adapter="c", max_tokens=2)
    plain = world.add(PROMPT, max_tokens=6)
    same = world.add(PROMPT, adapter="a", max_tokens=2)

    assert started(world) == [first, second, plain, same]
    later = [request_id for _ in range(4) for request_id in started(world)]
    assert later == [third]
    world.run_to_end()


def test_rows_name_their_adapter() -> None:
    world = EngineWorld(_config())
    world.add(PROMPT, adapter="a")
    world.add(PROMPT)

    assert [row.adapter for row in world.step().started] == ["a", ""]
    world.run_to_end()


def test_a_waiting_adapter_is_not_starved() -> None:
    """After a time it lets no others pass, so that the places get free."""
    world = EngineWorld(_config(max_loras=1, max_adapter_wait_s=1.0))
    world.add(PROMPT, adapter="a", max_tokens=4)
    world.step()
    waiting = world.add(PROMPT, adapter="b", max_tokens=2)
    order: list[RequestId] = []
    for _ in range(60):
        world.add(PROMPT, adapter="a", max_tokens=4)
        order += started(world)
        world.now_s += 0.1
        if waiting in order:
            break

    assert waiting in order
    assert len(order) > 5  # others passed at first
    world.run_to_end()


@pytest.mark.parametrize("receives", [False, True])
def test_requests_without_an_adapter_pass_one_that_has_waited_long(receives: bool) -> None:
    world = EngineWorld(_config(max_loras=1))
    world.add(PROMPT, adapter="a", max_tokens=20)
    world.step()
    world.add([7] * 4, adapter="b", receives=receives, max_tokens=2)
    world.step()
    world.now_s += 60
    plain = world.add([8] * 4, receives=receives, max_tokens=2)
    plan = world.step()

    granted = [RequestId(order.handoff_id.request_id) for order in plan.kv_orders.receives]
    assert [*[row.request_id for row in plan.started], *granted] == [plain]
    world.run_to_end()


def test_one_adapter_gives_up_its_place_and_the_others_keep_theirs() -> None:
    world = EngineWorld(_config(max_num_seqs=16))
    for adapter in ("a", "b"):
        world.add(PROMPT, adapter=adapter, max_tokens=20)
    world.step()
    waiting = world.add([7] * 4, adapter="c", max_tokens=2)
    world.step()
    world.now_s += 60
    for_oldest = world.add([8] * 4, adapter="a", max_tokens=2)
    for_newer = world.add([6] * 4, adapter="b", max_tokens=2)

    assert started(world) == [for_newer]
    later = [request_id for _ in range(24) for request_id in started(world)]
    assert later == [waiting, for_oldest]
    world.run_to_end()


def test_requests_pass_again_after_the_one_that_claimed_their_place_is_aborted() -> None:
    world = EngineWorld(_config(max_loras=1))
    world.add(PROMPT, adapter="a", max_tokens=20)
    world.step()
    claimant = world.add([7] * 4, adapter="b", max_tokens=2)
    world.step()
    world.now_s += 60
    same = world.add([8] * 4, adapter="a", max_tokens=2)
    before = started(world)
    world.scheduler.abort(claimant)

    assert (before, started(world)) == ([], [same])
    world.run_to_end()


def test_an_urgent_request_takes_the_place_of_lax_ones() -> None:
    world = EngineWorld(_config(max_loras=1, policy=SchedulingPolicy.PRIORITY))
    lax = [world.add(PROMPT, adapter="a", max_tokens=40, priority=1) for _ in range(2)]
    world.step()
    urgent = world.add([7] * 4, adapter="b", max_tokens=2)
    plans = [world.step() for _ in range(2)]

    assert {request_id for plan in plans for request_id in plan.dropped} == {*lax}
    assert urgent in [row.request_id for plan in plans for row in plan.started]
    world.run_to_end()


def test_lax_requests_do_not_keep_a_place_from_an_urgent_one() -> None:
    """One that cannot be preempted holds it, but no lax one joins it, from the first step on."""
    world = EngineWorld(_config(max_loras=1, policy=SchedulingPolicy.PRIORITY))
    world.add(PROMPT, adapter="a", max_tokens=9)
    world.step()
    urgent = world.add([7] * 4, adapter="b", max_tokens=2, priority=1)
    order: list[RequestId] = []
    for _ in range(16):
        world.add([8] * 4, adapter="a", max_tokens=9, priority=2)
        order += started(world)

    assert order[0] == urgent
    world.run_to_end()


def test_nobody_is_preempted_for_a_place_that_preemption_cannot_give() -> None:
    config = _config(max_loras=1, max_num_seqs=3, policy=SchedulingPolicy.PRIORITY)
    world = EngineWorld(config)
    world.add(PROMPT, adapter="a", max_tokens=9)
    world.add(PROMPT, adapter="a", max_tokens=9, priority=2)
    world.add(PROMPT, max_tokens=9, priority=2)
    world.step()
    world.add([7] * 4, adapter="b", max_tokens=2, priority=1)

    assert [world.step().dropped for _ in range(4)] == [()] * 4
    world.run_to_end()


def test_an_aborted_request_gives_up_its_place() -> None:
    world = EngineWorld(_config(max_loras=1))
    first = world.add(PROMPT, adapter="a", max_tokens=20)
    world.step()
    waiting = world.add([7] * 4, adapter="b", max_tokens=2)
    world.step()
    world.scheduler.abort(first)

    assert waiting in [request_id for _ in range(2) for request_id in started(world)]
    world.run_to_end()


def test_a_preempted_request_gives_up_its_place() -> None:
    config = _config(max_loras=1, policy=SchedulingPolicy.PRIORITY)
    world = EngineWorld(config, num_blocks=8, block_size=4)
    lax = world.add(PROMPT, adapter="a", max_tokens=20, priority=1)
    world.step()
    urgent = world.add([7] * 24, max_tokens=4)
    other = world.add([6] * 4, adapter="b", max_tokens=2)
    order = [request_id for _ in range(12) for request_id in started(world)]

    assert world.scheduler.stats().total_preemptions
    assert order.index(urgent) < order.index(other)
    assert lax in order[order.index(other) :]
    world.run_to_end()


def test_receives_need_places_too() -> None:
    world = EngineWorld(_config(max_loras=1))
    world.add(PROMPT, adapter="a", max_tokens=6)
    world.step()
    waiting = world.add([7] * 20, adapter="b", receives=True, max_tokens=2)
    world.step()

    assert world.scheduler.stats().num_waiting_for_remote_kvs == 0
    world.run_to_end()
    assert world.receipts[waiting].finish_reason is not None


def test_an_unknown_adapter_is_refused() -> None:
    world = EngineWorld(_config())
    request = EngineRequest(
        RequestId("r"), (1, 2), SamplingParams(), 0, adapter=AdapterRef("a", "a")
    )
    with pytest.raises(InvalidRequest, match="'a' is not served"):
        world.scheduler.add(request)


def test_places_are_counted_by_adapter() -> None:
    places = BatchAdapters(1)
    requests = [
        EngineRequest(
            RequestId(name), (1,), SamplingParams(), 0, adapter=AdapterRef(adapter, adapter)
        )
        for name, adapter in (("r", "a"), ("s", "a"))
    ]
    for request in (*requests, requests[0]):
        places.take(request)

    assert (len(places), places.oldest, places.num_free) == (1, "a", 0)
    assert (places.has_place("a"), places.has_place("b")) == (True, False)
    free = []
    for request in (requests[0], requests[0], requests[1], requests[1]):
        places.release(request)
        free.append(places.has_place("b"))
    assert free == [False, False, True, True]
