"""Decode side of a hand-off in the scheduler: grant, landing, loss and release of blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import BlockId, HandoffId, RequestId
from baton.core.output import Failure, FailureCause, FinishReason, FirstToken
from baton.core.request import ReceiveKv
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import LoadFailurePolicy, SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.types import KvReports, Landed, Receive
from tests.support.engine_world import SOURCE, EngineWorld
from tests.support.requests import make_engine_request
from tests.support.scheduler_state import awaits_peers

_config = partial(SchedulerConfig, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


def test_a_receiver_is_granted_blocks_for_its_whole_prompt() -> None:
    world = EngineWorld(_config(), block_size=4)
    name = world.add(10, receives=True)

    plan = world.step()

    blocks = tuple(BlockId(n) for n in range(3))
    order = Receive(_handoff(name), SOURCE, 0, blocks, 10)
    assert plan.kv_orders.receives == (order,)
    assert plan.started == ()
    assert awaits_peers(world.scheduler)
    assert not world.scheduler.has_work
    world.run_to_end()


def test_a_landed_request_computes_nothing_of_its_prompt() -> None:
    world = EngineWorld(_config())
    name = world.add(10, receives=True, max_tokens=4)

    world.run_to_end()

    assert world.runner.num_computed[name] == 3


def test_the_received_first_token_is_emitted_at_once_and_only_once() -> None:
    world = EngineWorld(_config())
    name = world.add(10, receives=True, max_tokens=4)
    world.step()
    world.wire.land(_handoff(name))

    world.step()
    at_landing = list(world.tokens(name))
    plan = world.step()

    assert len(at_landing) == 1
    (row,) = plan.started
    assert len(row.token_ids) == 11
    assert row.num_computed_tokens == 10
    world.run_to_end()
    assert [o.first_index for o in world.receipts[name].outputs] == [0, 1, 2, 3]


def test_a_received_first_token_can_finish_the_request() -> None:
    answer, _ = EngineWorld().alone(make_engine_request([5, 4, 3]))
    world = EngineWorld(_config(eos_token_ids=frozenset(answer[:1])))
    name = world.add([5, 4, 3], receives=True)

    world.run_to_end()

    assert world.finish_reason(name) is FinishReason.STOP
    assert world.runner.num_computed == {}


def test_max_tokens_of_one_yields_one_token() -> None:
    world = EngineWorld(_config())
    name = world.add(5, receives=True, max_tokens=1)

    world.run_to_end()

    assert world.finish_reason(name) is FinishReason.LENGTH
    assert len(world.tokens(name)) == 1


def test_only_missing_blocks_are_received() -> None:
    world = _world_that_served(list(range(12)))

    name = world.add([*range(8), 9, 9, 9], receives=True)
    (order,) = world.step().kv_orders.receives

    assert order.first_block == 2
    assert len(order.block_ids) == 1
    world.run_to_end()
    assert world.runner.num_computed[name] == 3


def test_a_full_prefix_hit_receives_no_block_and_still_finishes() -> None:
    world = _world_that_served(list(range(8)))

    name = world.add(list(range(8)), receives=True)
    (order,) = world.step().kv_orders.receives

    assert (order.first_block, order.block_ids) == (2, ())
    world.run_to_end()
    assert world.finish_reason(name) is FinishReason.LENGTH
    assert world.runner.num_computed[name] == 3


def test_blocks_in_flight_are_no_prefix_hits() -> None:
    world = EngineWorld(_config(), block_size=4)
    world.add(9, receives=True)
    world.step()

    world.add(9)
    (row,) = world.step().started

    assert row.num_computed_tokens == 0
    world.run_to_end()


def test_landed_blocks_are_prefix_hits() -> None:
    world = EngineWorld(_config(), block_size=4)
    name = world.add(9, receives=True, max_tokens=9)
    world.step()
    world.wire.land(_handoff(name))
    world.step()

    world.add(9)
    plan = world.step()

    assert [row.num_computed_tokens for row in plan.started] == [9, 8]
    world.run_to_end()


# --- lost -------------------------------------------------------------------------


def test_a_lost_request_computes_only_blocks_not_proved_to_have_landed() -> None:
    world = EngineWorld(_config(), block_size=4)
    name = world.add(18, receives=True)
    world.step()
    world.wire.lose(_handoff(name), num_proved=3)
    world.step_until(lambda _: world.finish_reason(name))
    world.wire.release(_handoff(name))

    world.run_to_end()

    served = world.receipts[name].outputs[-1].served
    assert served is not None
    assert (served.num_cached_tokens, served.num_prefilled_tokens) == (12, 6)


def test_landed_blocks_of_an_aborted_request_are_reused_by_its_next_attempt() -> None:
    world = EngineWorld(_config(), block_size=4)
    world.wire.num_proved_if_revoked = 3
    first = world.add(18, receives=True)
    world.step()
    world.abort(first)
    world.step()

    world.add(18, receives=True)
    (receive,) = world.step().kv_orders.receives

    assert receive.num_cached_tokens == 12
    world.run_to_end()


def test_blocks_of_an_aborted_request_are_not_cached_across_a_reset() -> None:
    world = EngineWorld(_config(), block_size=4)
    world.wire.num_proved_if_revoked = 3
    first = world.add(18, receives=True)
    world.step()
    world.abort(first)
    world.scheduler.reset_prefix_cache()
    world.step()

    world.add(18, receives=True)
    (receive,) = world.step().kv_orders.receives

    assert receive.num_cached_tokens == 0
    world.run_to_end()


def test_a_lost_hand_off_without_recurrent_state_keeps_no_blocks() -> None:
    world = EngineWorld(_config(), block_size=4, num_state_blocks=1)
    name = world.add(18, receives=True)
    world.step()
    world.wire.lose(_handoff(name), num_proved=5)
    world.run_to_end()

    served = world.receipts[name].outputs[-1].served
    assert served is not None
    assert served.num_prefilled_tokens == 18


def test_a_lost_request_restarts_locally() -> None:
    world = EngineWorld(_config(), block_size=4)
    name = world.add(10, receives=True)
    world.step()

    world.wire.lose(_handoff(name))
    world.step()
    (row,) = world.step().started

    assert row.num_computed_tokens == 0
    assert not set(row.block_tables[0]) & {0, 1, 2}
    world.run_to_end()
    assert world.finish_reason(name) is FinishReason.LENGTH


def test_a_lost_request_can_use_cached_blocks() -> None:
    world = _world_that_served(list(range(8)))
    name = world.add([*range(8), 1, 1], receives=True)
    world.step()

    world.wire.lose(_handoff(name))
    world.step()
    (row,) = world.step().started

    assert row.num_computed_tokens == 8
    world.run_to_end()


def test_the_blocks_of_a_lost_receive_stay_held_until_the_release() -> None:
    world = EngineWorld(_config(), num_blocks=4, block_size=4)
    name = world.add(10, receives=True)
    world.step()
    world.wire.lose(_handoff(name))
    world.step()

    plans = [world.step() for _ in range(3)]
    world.wire.release(_handoff(name))
    world.step()
    after = world.step()

    assert plans == [Plan()] * 3
    assert [row.request_id for row in after.started] == [name]
    world.run_to_end()


def test_landed_kv_of_another_length_counts_as_lost() -> None:
    scheduler = Scheduler(_config(), CacheConfig(8))
    handoff_id = HandoffId("r", 1)
    scheduler.add(replace(make_engine_request(), receive_from=ReceiveKv(handoff_id, SOURCE)))
    plan = scheduler.schedule(0.0)

    landed = Landed(handoff_id, num_tokens=2, first_token=FirstToken(7))
    outputs = scheduler.update(plan, RunResult(), KvReports(finished_recving=(landed,)))
    (row,) = scheduler.schedule(0.0).started

    assert outputs == []
    assert (row.token_ids, row.num_computed_tokens) == (make_engine_request().prompt_token_ids, 0)
    scheduler.check()


def test_by_policy_a_lost_request_ends_with_an_error() -> None:
    world = EngineWorld(_config(kv_load_failure_policy=LoadFailurePolicy.FAIL))
    name = world.add(10, receives=True)
    world.step()

    world.wire.lose(_handoff(name))
    world.step()

    last = world.receipts[name].outputs[-1]
    assert last.finish_reason is FinishReason.ERROR
    reason = "the KV of the prompt was lost: the peer is gone"
    assert last.failure == Failure(reason, FailureCause.KV_LOST)
    world.run_to_end()


# --- aborted ----------------------------------------------------------------------


def test_aborting_mid_load_ends_the_request_and_keeps_the_blocks_until_the_release() -> None:
    world = EngineWorld(_config(), num_blocks=8, block_size=4)
    name = world.add(10, receives=True)
    world.step()

    world.abort(name)
    plan = world.step()
    free_before = world.scheduler.stats().num_free_blocks
    world.wire.release(_handoff(name))
    world.step()

    assert world.finish_reason(name) is FinishReason.ABORT
    assert plan.kv_orders.revokes == (_handoff(name),)
    assert (free_before, world.scheduler.stats().num_free_blocks) == (5, 8)
    world.run_to_end()


def test_a_transfer_that_lands_while_revoked_releases_its_blocks() -> None:
    world = EngineWorld(_config())
    name = world.add(10, receives=True)
    world.step()

    world.wire.land(_handoff(name))
    world.abort(name)
    world.step()

    assert world.tokens(name) == []
    world.run_to_end()


def test_aborting_before_the_grant_sends_no_revoke() -> None:
    world = EngineWorld(_config())
    name = world.add(10, receives=True)

    world.abort(name)

    assert world.step() == Plan()
    world.run_to_end()


def test_aborting_a_landed_request_releases_its_blocks() -> None:
    world = EngineWorld(_config(max_num_seqs=1))
    name = _make_ready_behind_another(world)

    world.abort(name)

    world.run_to_end()
    assert world.finish_reason(name) is FinishReason.ABORT


def test_a_hand_off_id_stays_in_use_until_the_release() -> None:
    world = EngineWorld(_config())
    name = world.add(10, request_id="same", receives=True)
    world.step()
    world.abort(name)

    with pytest.raises(InvalidRequest, match="hand-off same#1 is in use"):
        world.add(10, request_id="same", receives=True)
    world.run_to_end()


def test_reports_about_unknown_hand_offs_change_nothing() -> None:
    world = EngineWorld(_config())
    name = world.add(10, receives=True)
    world.step()
    world.wire.lose(_handoff(name))
    world.step()
    world.wire.release(_handoff(name))
    world.step()

    world.wire.report_again_released(_handoff(name))
    world.step()

    world.scheduler.check()
    world.run_to_end()


# --- others -----------------------------------------------------------------------


def test_a_migrated_request_receives_the_kv_of_its_earlier_output() -> None:
    world = EngineWorld(_config())
    name = world.add(3, prior=[1, 2], receives=True, max_tokens=5)

    (order,) = world.step().kv_orders.receives
    world.run_to_end()

    assert order.num_tokens == 5
    assert [output.first_index for output in world.receipts[name].outputs] == [2, 3, 4]


def test_a_prompt_too_long_to_compute_whole_may_still_be_received() -> None:
    config = _config(max_num_batched_tokens=4, enable_chunked_prefill=False)
    world = EngineWorld(config)
    name = world.add(12, receives=True)
    world.step()

    world.wire.lose(_handoff(name))
    world.run_to_end()

    assert world.finish_reason(name) is FinishReason.LENGTH


def test_kv_in_flight_at_a_reset_is_not_cached() -> None:
    world = EngineWorld(_config(), block_size=4)
    name = world.add(9, receives=True)
    world.step()

    world.scheduler.reset_prefix_cache()
    world.run_to_end()
    world.add(9)

    (row,) = world.step().started
    assert row.num_computed_tokens == 0
    world.run_to_end()
    assert world.finish_reason(name) is FinishReason.LENGTH


def _handoff(name: RequestId) -> HandoffId:
    return HandoffId(name, 1)


def _world_that_served(prompt: list[int]) -> EngineWorld:
    """Return a world with blocks of four tokens that caches this prompt."""
    world = EngineWorld(_config(), block_size=4)
    world.add(prompt)
    world.run_to_end()
    return world


def _make_ready_behind_another(world: EngineWorld) -> RequestId:
    """Land a request while the only place in the batch is taken."""
    world.add([9] * 3, max_tokens=6)
    world.step()
    ready = world.add(3, receives=True)
    world.step()
    world.wire.land(_handoff(ready))
    world.step()
    return ready
