"""Pulls of cached prefixes: from a peer, and by a peer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton.core.ids import HandoffId, NodeId, RequestId
from baton.core.output import RequestStats
from baton.core.sampling import SamplingParams
from baton.engine.kv_arrival.pulls import (
    AVOID_S,
    BYTE_S,
    FORGET_S,
    LATENCY_S,
    PullConfig,
    PullTimes,
)
from baton.engine.kv_cache.block_hashes import HASH_BYTES, BlockHash
from baton.engine.kv_cache.block_names import name_in_group, snapshot_names
from baton.engine.kv_cache.groups import FULL, ONE_GROUP, KvCacheSpec, KvGroup
from baton.engine.plan import Plan
from baton.engine.scheduler.config import SchedulerConfig
from baton.kv_transfer.types import NOT_CACHED, TOO_MANY_PULLS, Receive
from tests.support.engine_world import BLOCKS_PER_RUN, VOCAB_SIZE, EngineWorld
from tests.support.scheduler_state import awaits_peers

BLOCK_SIZE = 4
PROMPT = 26  # tokens: six whole blocks
NUM_WHOLE = 24
WINDOWED = (KvGroup(FULL, (0,)), KvGroup(KvCacheSpec(window=6), (1,)))
PEER = NodeId("peer")


def world(
    *,
    num_blocks: int = 64,
    groups: tuple[KvGroup, ...] = ONE_GROUP,
    has_external: bool = False,
    **config: float,
) -> EngineWorld:
    it = EngineWorld(
        SchedulerConfig(max_num_seqs=4, **config),  # type: ignore[arg-type]
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        groups=groups,
        external_chance=random.Random(0) if has_external else None,
    )
    if it.external is not None:
        it.external._fails = False
    return it


def pulls_of(plan: Plan) -> list[Receive]:
    return [receive for receive in plan.kv_orders.receives if receive.names]


def pulled(it: EngineWorld, num_promised: int = NUM_WHOLE) -> tuple[RequestId, list[Receive]]:
    """Add a request whose prefix a peer has. Returns it with the runs that were ordered."""
    name = it.add(PROMPT, num_promised=num_promised)
    return name, pulls_of(it.step())


def served(it: EngineWorld, name: RequestId) -> RequestStats:
    stats = it.receipts[name].outputs[-1].served
    assert stats is not None
    return stats


def names_of(it: EngineWorld, num_tokens: int) -> list[BlockHash]:
    """Return the names of the first blocks of all prompts that are given as a number."""
    token_ids = [position % VOCAB_SIZE for position in range(num_tokens)]
    return it.cache_config.naming.names(token_ids, num_tokens)


def is_scheduled(name: RequestId, plan: Plan) -> bool:
    return name in plan.num_scheduled_tokens


@pytest.mark.parametrize("groups", [ONE_GROUP, WINDOWED])
def test_a_prefix_cached_by_a_peer_is_pulled_instead_of_computed(
    groups: tuple[KvGroup, ...],
) -> None:
    it = world(groups=groups)

    name, _ = pulled(it)
    it.run_to_end()

    assert served(it, name).loaded_tokens == {"peer": NUM_WHOLE}
    assert served(it, name).num_cached_tokens == NUM_WHOLE
    assert served(it, name).num_prefilled_tokens == PROMPT - NUM_WHOLE


def test_pull_runs_are_bounded_and_have_unique_ids() -> None:
    it = world()

    _, runs = pulled(it)

    assert [len(run.names) for run in runs] == [BLOCKS_PER_RUN] * 3
    assert len({run.handoff_id for run in runs}) == 3
    assert {run.handoff_id.request_id for run in runs} == {"pull-here"}
    it.run_to_end()


@pytest.mark.parametrize(("max_run_bytes", "expected"), [(1 << 30, 64), (1 << 20, 8), (1 << 10, 1)])
def test_a_pull_run_is_bounded_by_blocks_and_bytes(max_run_bytes: int, expected: int) -> None:
    config = PullConfig("name", block_bytes=1 << 17, max_run_bytes=max_run_bytes)
    assert config.blocks_per_run == expected


def test_blocks_behind_a_window_are_not_pulled() -> None:
    it = world(groups=WINDOWED)

    _, runs = pulled(it)

    # The token at position 24 sees those from position 19 on.
    assert sum(len(run.names) for run in runs) == 6 + 2
    it.run_to_end()


def test_only_uncached_blocks_are_pulled() -> None:
    it = world()
    it.add(10)
    it.run_to_end()

    name, runs = pulled(it)
    it.run_to_end()

    assert sum(len(run.names) for run in runs) == 4
    assert served(it, name).loaded_tokens == {"peer": 16}


@pytest.mark.parametrize("num_promised", [0, 3, 8])
def test_nothing_is_pulled_from_a_peer_without_additional_blocks(num_promised: int) -> None:
    it = world()
    it.add(10)
    it.run_to_end()

    name, runs = pulled(it, num_promised)

    assert not runs
    assert is_scheduled(name, it.step()) or it.receipts[name].outputs
    it.run_to_end()


def test_a_request_that_waits_for_a_pull_holds_no_blocks_and_does_not_delay_others() -> None:
    it = world()
    waiting, _ = pulled(it)

    other = it.add([9, 9, 9])
    it.step_until(lambda plan: is_scheduled(other, plan))

    assert not it.receipts[waiting].outputs
    (request,) = [r for r in it.scheduler._state.waiting if r.request_id == waiting]
    assert not request.kv.num_blocks
    it.run_to_end()


def test_landed_runs_are_kept_if_another_run_fails() -> None:
    it = world()
    name, runs = pulled(it)
    it.wire.land(runs[2].handoff_id)
    it.wire.land(runs[0].handoff_id)
    it.step()
    assert not it.receipts[name].outputs

    it.wire.lose(runs[1].handoff_id)
    it.step_until(lambda plan: is_scheduled(name, plan))
    it.step_until(lambda plan: it.finish_reason(name))

    assert served(it, name).loaded_tokens == {"peer": 8}
    assert served(it, name).num_prefilled_tokens == PROMPT - 8
    pool = it.scheduler._state.cache.pool
    assert all(map(pool.is_cached, names_of(it, NUM_WHOLE)[4:]))
    it.wire.release(runs[1].handoff_id)
    it.run_to_end()


def test_blocks_are_not_cached_before_they_land() -> None:
    it = world()
    _, runs = pulled(it)
    pool = it.scheduler._state.cache.pool

    it.wire.land(runs[0].handoff_id)
    it.step()

    names = names_of(it, NUM_WHOLE)
    assert [pool.is_cached(name) for name in names] == [True] * 2 + [False] * 4
    it.run_to_end()


def test_blocks_of_a_failed_run_stay_fenced_until_no_write_can_land() -> None:
    it = world(num_blocks=16)
    name, runs = pulled(it)
    for run in runs:
        it.wire.lose(run.handoff_id)
    it.step_until(lambda plan: it.finish_reason(name))

    assert it.scheduler.stats().num_free_blocks == 16 - 6
    assert awaits_peers(it.scheduler)
    for run in runs:
        it.wire.release(run.handoff_id)
    it.step()
    assert it.scheduler.stats().num_free_blocks == 16
    it.run_to_end()


def test_a_second_request_with_the_prefix_waits_for_the_same_pull() -> None:
    it = world()
    first, runs = pulled(it)

    second, more = pulled(it)

    assert not more
    for run in runs:
        it.wire.land(run.handoff_id)
    it.run_to_end()
    assert served(it, first).loaded_tokens == {"peer": NUM_WHOLE}
    assert served(it, second).loaded_tokens == {}
    assert served(it, second).num_cached_tokens == NUM_WHOLE


def test_a_follower_of_a_failed_pull_pulls_itself() -> None:
    it = world()
    _, runs = pulled(it)
    second, _ = pulled(it)

    for run in runs:
        it.wire.lose(run.handoff_id)
    it.step()
    again = pulls_of(it.step())

    assert [run.names for run in again] == [run.names for run in runs]
    it.run_to_end()
    assert served(it, second).num_cached_tokens == NUM_WHOLE


def test_a_slow_pull_times_out_and_its_peer_is_avoided() -> None:
    it = world(max_fill_wait_s=2.0)
    slow, _ = pulled(it)
    it.wait(1.9)
    assert not is_scheduled(slow, it.step())

    it.wait(0.2)
    it.step_until(lambda plan: it.finish_reason(slow))
    assert served(it, slow).loaded_tokens == {}
    _, more = pulled(it)
    assert not more

    it.run_to_end()
    it.evict_cached()
    it.wait(AVOID_S)
    _, more = pulled(it)
    assert more
    it.run_to_end()


def test_aborting_a_request_does_not_stop_its_pull_for_followers() -> None:
    it = world()
    name, runs = pulled(it)
    it.abort(name)
    it.step()

    for run in runs:
        it.wire.land(run.handoff_id)
    it.step()
    other = it.add(PROMPT)
    it.run_to_end()

    assert served(it, other).num_cached_tokens == NUM_WHOLE


def test_a_pull_interrupted_by_a_reset_is_not_cached() -> None:
    it = world()
    name, runs = pulled(it)

    it.scheduler.reset_prefix_cache()
    for run in runs:
        it.wire.land(run.handoff_id)
    it.step()
    it.run_to_end()

    assert served(it, name).loaded_tokens == {}
    assert served(it, name).num_cached_tokens == 0


def test_a_pull_that_would_take_longer_than_computing_is_not_started() -> None:
    it = world()
    pace = it.scheduler._planner.budget.pace
    pace.record_step(LATENCY_S, 0, NUM_WHOLE)
    name, runs = pulled(it)
    assert not runs
    it.run_to_end()
    it.evict_cached()

    pace.record_step(1.0, 0, NUM_WHOLE)
    name, runs = pulled(it)
    assert runs
    it.run_to_end()
    assert served(it, name).loaded_tokens == {"peer": NUM_WHOLE}


def test_blocks_missing_in_a_tier_are_pulled_after_the_load() -> None:
    it = EngineWorld(
        SchedulerConfig(max_num_seqs=4),
        num_blocks=64,
        block_size=BLOCK_SIZE,
        external_chance=random.Random(0),
    )
    assert it.external is not None
    it.external._fails = False
    it.add(14)
    it.run_to_end()
    it.evict_cached()

    name, runs = pulled(it)
    assert not runs
    it.run_to_end()

    assert served(it, name).loaded_tokens == {"host": 12, "peer": 12}


def test_a_peer_that_is_faster_than_a_tier_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    it = EngineWorld(
        SchedulerConfig(max_num_seqs=4),
        num_blocks=64,
        block_size=BLOCK_SIZE,
        external_chance=random.Random(0),
    )
    assert it.external is not None
    it.external._fails = False
    it.add(PROMPT)
    it.run_to_end()
    it.evict_cached()
    it.scheduler._planner.budget.pace.record_step(12.0, 0, 12)  # a second for a token
    monkeypatch.setattr(it.external, "load_s", lambda _: 5.0)

    name, runs = pulled(it)
    it.run_to_end()

    assert runs
    assert served(it, name).loaded_tokens == {"peer": NUM_WHOLE}


def test_requests_with_prompt_logprobs_pull_nothing() -> None:
    it = world()
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=1)
    it.add(PROMPT, num_promised=NUM_WHOLE, sampling=sampling)
    assert not pulls_of(it.step())
    it.run_to_end()


def recurrent_world(**options: Any) -> EngineWorld:
    return EngineWorld(num_blocks=64, block_size=BLOCK_SIZE, num_state_blocks=2, **options)


def test_a_recurrent_state_snapshot_is_pulled_in_separate_runs() -> None:
    it = recurrent_world()

    name, runs = pulled(it, num_promised=12)
    it.run_to_end()

    names = names_of(it, 12)
    assert [list(run.names) for run in runs] == [
        names[:BLOCKS_PER_RUN],
        names[BLOCKS_PER_RUN:],
        snapshot_names(names[-1], 1, 2),
    ]
    assert served(it, name).loaded_tokens == {"peer": 12}
    assert served(it, name).num_prefilled_tokens == PROMPT - 12


def test_a_snapshot_beyond_the_prompt_is_not_pulled() -> None:
    it = recurrent_world()
    _, runs = pulled(it, num_promised=NUM_WHOLE + BLOCK_SIZE)
    assert not runs
    it.run_to_end()


def test_a_snapshot_whose_pull_was_interrupted_by_a_reset_is_not_cached() -> None:
    it = recurrent_world()
    _, runs = pulled(it, num_promised=16)
    it.scheduler.reset_prefix_cache()
    for run in runs:
        it.wire.land(run.handoff_id)

    it.step()

    assert it.num_snapshots == 0
    it.run_to_end()


def test_a_snapshot_in_a_tier_is_loaded_and_then_sent_to_the_puller() -> None:
    it = recurrent_world(external_chance=random.Random(0))
    assert it.external is not None
    it.external._fails = False
    it.add(PROMPT)
    it.run_to_end()
    it.evict_cached()
    *_, last = (name for name in it.external.blocks if len(name) > HASH_BYTES)
    end = BlockHash(last[:HASH_BYTES])
    handoff_id = it.request_blocks([end, *snapshot_names(end, 1, 2)])

    plan = step_until(it, lambda plan: bool(plan.kv_orders.sends or plan.kv_orders.withdraws))

    (send,) = plan.kv_orders.sends
    assert len(send.block_ids) == 3
    it.wire.misbehave()  # checks what is sent
    assert it.num_snapshots == 1
    it.wire.end_sending(handoff_id)
    it.run_to_end()


def test_a_name_that_no_group_gives_is_never_cached() -> None:
    it = world(has_external=True)
    assert it.external is not None
    it.external._fails = False
    it.add(PROMPT)
    it.run_to_end()
    it.evict_cached()
    name, *_ = it.external.blocks
    made_up = name_in_group(BlockHash(name), 200)
    it.external.blocks[made_up] = it.external.blocks[name]
    it.request_blocks([made_up])

    plan = step_until(it, lambda plan: bool(plan.kv_orders.sends or plan.kv_orders.withdraws))

    assert plan.kv_orders.withdraws
    it.run_to_end()
    it.evict_cached()


def test_a_snapshot_whose_prefix_did_not_land_is_not_cached() -> None:
    it = recurrent_world()
    name, runs = pulled(it, num_promised=16)
    it.wire.lose(runs[0].handoff_id)
    it.wire.land(runs[1].handoff_id)
    it.wire.land(runs[2].handoff_id)
    it.step()
    assert it.num_snapshots == 0
    it.wire.release(runs[0].handoff_id)
    it.run_to_end()
    assert served(it, name).loaded_tokens == {}
    assert served(it, name).num_prefilled_tokens == PROMPT


def test_a_receiving_request_pulls_nothing() -> None:
    it = world()
    name = it.add(PROMPT, receives=True, num_promised=NUM_WHOLE)
    assert not pulls_of(it.step())
    it.run_to_end()
    assert served(it, name).num_received_tokens == PROMPT


def test_pulls_reserve_at_most_half_of_the_cache() -> None:
    it = world(num_blocks=20)
    _, first = pulled(it)
    it.add([5] * PROMPT, num_promised=NUM_WHOLE)
    second = pulls_of(it.step())

    assert sum(len(run.names) for run in first) == 6
    assert not second  # 12 blocks would be more than 10
    it.run_to_end()


# --- pulls by peers -----------------------------------------------------------------------


def cached_names(it: EngineWorld, num_tokens: int = NUM_WHOLE) -> list[BlockHash]:
    """Serve a prompt. Returns the names of its blocks."""
    it.add(num_tokens + 2)
    it.run_to_end()
    return names_of(it, num_tokens)


def requested_pull(it: EngineWorld, names: Sequence[bytes]) -> tuple[HandoffId, Plan]:
    """Let a peer pull. Returns the plan that answers it."""
    handoff_id = it.request_blocks(names)
    it.step()
    return handoff_id, it.step()


def test_pulled_blocks_are_found_by_name_and_held_until_sent() -> None:
    it = world()
    names = cached_names(it)

    handoff_id, plan = requested_pull(it, names[1:3])

    (send,), (complete,) = plan.kv_orders.sends, plan.kv_orders.completes
    assert (send.handoff_id, len(send.block_ids)) == (handoff_id, 2)
    assert (complete.handoff_id, complete.first_token) == (handoff_id, None)
    it.evict_cached()
    it.add([7] * 40)
    it.step()  # the simulation checks the content of blocks that are sent
    it.wire.end_sending(handoff_id)
    it.run_to_end()


def test_a_pull_of_partially_cached_blocks_is_refused() -> None:
    it = world()
    names = cached_names(it)
    it.wire.know({b"unknown": []})

    handoff_id, plan = requested_pull(it, [names[0], b"unknown"])

    (withdraw,) = plan.kv_orders.withdraws
    assert (withdraw.handoff_id, withdraw.reason) == (handoff_id, NOT_CACHED)
    assert not plan.kv_orders.sends
    it.run_to_end()


@pytest.mark.parametrize("num_evicted", [1, 6])
def test_blocks_in_a_tier_are_loaded_and_then_sent_to_the_puller(num_evicted: int) -> None:
    it = world(has_external=True)
    names = cached_names(it)
    pool = it.scheduler._state.cache.pool
    pool.unregister(pool.find(names)[-num_evicted:])
    handoff_id = it.request_blocks(names)
    plan = step_until(it, lambda plan: bool(plan.kv_orders.sends or plan.kv_orders.withdraws))

    (send,) = plan.kv_orders.sends
    assert (send.handoff_id, len(send.block_ids)) == (handoff_id, len(names))
    assert it.external is not None
    assert it.external.num_loaded == num_evicted
    it.wire.end_sending(handoff_id)
    it.run_to_end()


def test_a_pull_whose_load_fails_is_refused() -> None:
    it = world(has_external=True)
    names = cached_names(it)
    it.evict_cached()
    assert it.external is not None
    handoff_id = it.request_blocks(names)
    step_until(it, lambda _: bool(it.external and it.external.loads))
    del it.external.blocks[names[2]]

    plan = step_until(it, lambda plan: bool(plan.kv_orders.sends or plan.kv_orders.withdraws))

    (withdraw,) = plan.kv_orders.withdraws
    assert (withdraw.handoff_id, withdraw.reason) == (handoff_id, NOT_CACHED)
    it.run_to_end()


def step_until(it: EngineWorld, is_reached: Callable[[Plan], bool]) -> Plan:
    for _ in range(100):
        plan = it.step()
        if is_reached(plan):
            return plan
    raise AssertionError("it was not reached in 100 steps")


def test_pulls_beyond_half_of_the_cache_are_queued() -> None:
    it = world(num_blocks=8)
    names = cached_names(it, 12)
    first, plan = requested_pull(it, names)
    assert plan.kv_orders.sends

    second, plan = requested_pull(it, names[:2])
    assert not plan.kv_orders.sends
    it.wire.end_sending(first)
    it.step()

    assert [send.handoff_id for send in it.step().kv_orders.sends] == [second]
    it.run_to_end()


def test_a_pull_of_more_than_half_of_the_cache_is_refused() -> None:
    it = world(num_blocks=8)
    names = cached_names(it, 12)

    _, plan = requested_pull(it, [*names, names[0], names[1]])

    assert [each.reason for each in plan.kv_orders.withdraws] == [TOO_MANY_PULLS]
    it.run_to_end()


def test_a_pull_with_an_id_in_use_sends_nothing() -> None:
    it = world()
    names = cached_names(it)
    sender = it.add(PROMPT, sends=True)
    it.step()
    handoff_id = HandoffId(sender, 1)
    outgoing = it.wire.outgoing[handoff_id]
    num_sent = len(outgoing.block_ids)

    it.wire.request(handoff_id, names)
    it.wire.outgoing[handoff_id] = outgoing
    plan = it.step_until(lambda plan: plan.kv_orders.completes)

    assert [each.first_token is None for each in plan.kv_orders.completes] == [False]
    assert num_sent <= 7
    it.run_to_end()


def test_blocks_being_sent_are_withdrawn_if_their_kv_may_be_wrong() -> None:
    it = world()
    name = it.add(PROMPT, max_tokens=8)
    it.step_until(lambda plan: it.tokens(name))
    names = names_of(it, 8)
    handoff_id, _ = requested_pull(it, names)

    it.fail_next_token(name)
    plan = it.step_until(lambda plan: plan.kv_orders.withdraws)

    assert [each.handoff_id for each in plan.kv_orders.withdraws] == [handoff_id]
    it.run_to_end()


# --- estimates ------------------------------------------------------------------------------


def test_pull_times_are_estimated_from_recent_pulls_of_the_same_peer() -> None:
    times, num_bytes = PullTimes(), 100 << 20
    assert times.estimate_s(PEER, num_bytes, 0.0) == LATENCY_S + num_bytes * BYTE_S

    times.record(PEER, num_bytes, LATENCY_S + 10.0, 1.0)

    assert times.estimate_s(PEER, num_bytes // 2, 2.0) == pytest.approx(LATENCY_S + 5.0)
    assert times.estimate_s(NodeId("other"), num_bytes, 2.0) == LATENCY_S + num_bytes * BYTE_S
    expected = LATENCY_S + num_bytes * BYTE_S
    assert times.estimate_s(PEER, num_bytes, 1.0 + FORGET_S) == expected


def test_estimates_ignore_immediately_failed_pulls_and_include_slow_ones() -> None:
    times = PullTimes()
    times.record_failure(PEER, 0.1, 0.0)
    assert times.estimate_s(PEER, 0, 0.0) == LATENCY_S

    times.record_failure(PEER, 3.0, 0.0)

    assert times.estimate_s(PEER, 0, AVOID_S - 0.1) is None
    assert times.estimate_s(PEER, 0, AVOID_S) == LATENCY_S
    assert times.estimate_s(NodeId("other"), 0, 0.0) == LATENCY_S
