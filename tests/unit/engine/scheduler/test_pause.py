"""Pause and resume of the scheduler, and resets that preempt running requests."""

from __future__ import annotations

import pytest

from baton.core.output import FinishReason
from baton.core.pause_mode import PauseMode
from baton.engine.plan import Plan
from tests.support.engine_world import EngineWorld
from tests.support.scheduler_state import is_idle


def has_paused(world: EngineWorld) -> bool:
    return world.scheduler.has_paused


def test_a_kept_request_computes_nothing_until_it_is_resumed_and_goes_on_with_its_blocks() -> None:
    world = EngineWorld()
    kept = world.add(6, max_tokens=4)
    world.step()
    world.step()
    known = list(world.tokens(kept))

    world.scheduler.pause(PauseMode.KEEP)
    held = world.scheduler.stats().num_free_blocks
    assert [world.step() for _ in range(3)] == [Plan()] * 3
    assert (world.tokens(kept), world.scheduler.has_work) == (known, False)

    world.resume()
    assert world.step().num_scheduled_tokens == {kept: 1}
    assert world.scheduler.stats().num_free_blocks == held
    world.run_to_end()
    assert world.scheduler.stats().total_preemptions == 0


@pytest.mark.parametrize("mode", PauseMode)
def test_a_request_that_comes_during_a_pause_starts_after_it(mode: PauseMode) -> None:
    world = EngineWorld()
    world.scheduler.pause(mode)
    late = world.add(6)
    assert (world.step(), world.scheduler.has_work) == (Plan(), False)

    world.resume()

    assert late in world.step().num_scheduled_tokens
    world.run_to_end()
    assert world.finish_reason(late) is FinishReason.LENGTH


def test_a_wait_ends_when_the_last_request_that_holds_blocks_has_ended() -> None:
    world = EngineWorld()
    running, receiving = world.add(6, max_tokens=3), world.add(9, receives=True, max_tokens=2)
    world.step()
    world.scheduler.pause(PauseMode.WAIT)
    queued = world.add(7)

    while world.finish_reason(running) is None:
        assert not has_paused(world)
        world.step()
    assert not has_paused(world)  # the peer may write the blocks of the other one
    world.wire.settle()
    while world.finish_reason(receiving) is None:
        world.step()

    assert has_paused(world)
    assert world.finish_reason(queued) is None
    world.run_to_end()


def test_an_abort_ends_running_and_queued_requests_and_keeps_blocks_that_a_peer_may_write() -> None:
    world = EngineWorld()
    world.add(6)
    world.add(9, receives=True)
    world.step()
    world.add(7)

    world.scheduler.pause(PauseMode.ABORT)
    world.step()

    assert {receipt.finish_reason for receipt in world.receipts.values()} == {FinishReason.ABORT}
    assert world.scheduler.stats().num_granted_blocks
    world.wire.settle()
    world.step()
    assert is_idle(world.scheduler)
    world.run_to_end()


def test_kv_that_lands_during_a_pause_is_used_after_it() -> None:
    world = EngineWorld()
    receiving = world.add(9, receives=True, max_tokens=3)
    world.step()
    world.scheduler.pause(PauseMode.KEEP)
    world.wire.settle()
    world.step()
    assert len(world.tokens(receiving)) == 1  # it came with the KV
    assert world.step() == Plan()

    world.resume()

    world.run_to_end()
    served = world.receipts[receiving].outputs[-1].served
    assert served is not None
    assert (served.num_received_tokens, served.num_prefilled_tokens) == (9, 0)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_reset_of_running_requests_frees_all_their_blocks_and_they_compute_again(
    runs_ahead: bool,
) -> None:
    world = EngineWorld(runs_ahead=runs_ahead)
    running = world.add(9, max_tokens=4)
    world.step()
    world.scheduler.pause(PauseMode.KEEP)

    world.reset_prefix_cache(reset_running=True)
    world.step()
    world.step()

    stats = world.scheduler.stats()
    assert (stats.num_free_blocks, stats.num_cached_free_blocks) == (stats.num_blocks, 0)
    assert stats.total_preemptions == 1
    world.run_to_end()
    served = world.receipts[running].outputs[-1].served
    assert served is not None
    assert served.num_prefilled_tokens > 9


def test_a_reset_leaves_blocks_of_hand_offs_in_flight_to_their_ends() -> None:
    world = EngineWorld()
    world.add(9, receives=True, max_tokens=2)
    world.step()
    granted = world.scheduler.stats().num_granted_blocks

    world.reset_prefix_cache(reset_running=True)
    world.step()

    assert world.scheduler.stats().num_granted_blocks == granted > 0
    world.run_to_end()
