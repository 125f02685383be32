"""Loads from, and stores to, a KV cache outside the engine."""

from __future__ import annotations

import random

import pytest

from baton.core.ids import HandoffId, RequestId
from baton.core.kv_hints import BlockHints, KvHints, tenant_of
from baton.core.output import FinishReason
from baton.core.sampling import SamplingParams
from baton.engine.kv_cache.block_hashes import HASH_BYTES
from baton.engine.kv_cache.groups import FULL, KvCacheSpec, KvGroup
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.prompt_budget import MAX_LOOKED_UP_TOKENS
from baton.kv_transfer.external_kv import NO_EXTERNAL_REPORTS, ExternalReports
from tests.support.engine_world import EngineWorld
from tests.support.fake_external import FakeExternal

BLOCK_SIZE = 4
WINDOWED = (KvGroup(FULL, (0,)), KvGroup(KvCacheSpec(window=6), (1,)))


def world(
    *,
    num_blocks: int = 32,
    groups: tuple[KvGroup, ...] | None = None,
    num_state_blocks: int = 0,
    **config: float,
) -> EngineWorld:
    it = EngineWorld(
        SchedulerConfig(max_num_seqs=4, **config),  # type: ignore[arg-type]
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        groups=groups or EngineWorld().cache_config.layout.groups,
        num_state_blocks=num_state_blocks,
        external_chance=random.Random(0),
    )
    assert it.external is not None
    it.external._fails = False
    return it


def external(it: EngineWorld) -> FakeExternal:
    assert it.external is not None
    return it.external


def cached_outside(it: EngineWorld, prompt: int = 14) -> None:
    """Serve a prompt, and evict its blocks from the prefix cache once they are stored."""
    it.add(prompt)
    it.run_to_end()
    it.evict_cached()
    it.step()


def served_tokens(it: EngineWorld, request_id: RequestId) -> dict[str, int]:
    served = it.receipts[request_id].outputs[-1].served
    assert served is not None
    assert served.num_cached_tokens >= sum(served.loaded_tokens.values())
    return dict(served.loaded_tokens)


@pytest.mark.parametrize("groups", [None, WINDOWED])
def test_an_evicted_prefix_is_loaded_instead_of_computed(
    groups: tuple[KvGroup, ...] | None,
) -> None:
    it = world(groups=groups)
    cached_outside(it)

    again = it.add(14)
    it.run_to_end()

    assert served_tokens(it, again) == {"host": 12}
    served = it.receipts[again].outputs[-1].served
    assert served is not None
    assert served.num_prefilled_tokens == 2


def test_a_load_names_the_request_that_waits_for_it() -> None:
    it = world()
    cached_outside(it)
    again = it.add(14)
    it.step_until(lambda plan: plan.kv_orders.external.loads)
    (load,) = external(it).loads
    it.run_to_end()

    assert load.request_id == again


def test_blocks_behind_a_failed_load_are_computed_and_not_counted_as_loaded() -> None:
    it = world()
    cached_outside(it)
    again = it.add(14)
    it.step_until(lambda plan: plan.kv_orders.external.loads)
    (load,) = external(it).loads
    del external(it).blocks[load.names[1]]
    it.run_to_end()

    assert served_tokens(it, again) == {"host": BLOCK_SIZE}


def test_loaded_output_blocks_do_not_count_as_prompt_tokens() -> None:
    it = world()
    first = it.add(6)
    it.run_to_end()
    it.evict_cached()
    it.step()
    answer = it.receipts[first].token_ids
    continued = it.add(6, prior=answer[:3], max_tokens=8)
    it.run_to_end()

    # Two blocks were loaded, of which six tokens are the prompt's.
    assert served_tokens(it, continued) == {"host": 6}


def test_blocks_behind_a_window_are_not_loaded() -> None:
    it = world(groups=WINDOWED, num_blocks=64)
    cached_outside(it, prompt=30)
    it.add(30)
    it.step_until(lambda plan: plan.kv_orders.external.loads)
    (load,) = external(it).loads
    # Of 7 blocks, the window of the token at position 28 sees those from position 23 on.
    assert len(load.names) == 7 + 2
    it.run_to_end()


def test_a_block_may_be_evicted_during_the_prefix_search(monkeypatch: pytest.MonkeyPatch) -> None:
    it = world(groups=WINDOWED, num_blocks=64)
    cached_outside(it, prompt=30)
    lost = dict.fromkeys(external(it).blocks, False)

    def holds_once(name: bytes) -> bool:
        is_held, lost[name] = not lost.get(name, True), True
        return is_held

    monkeypatch.setattr(external(it), "holds", holds_once)
    again = it.add(30)
    it.run_to_end()

    assert served_tokens(it, again) == {"host": 28}


def test_a_request_that_waits_for_a_load_holds_no_blocks_and_does_not_delay_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = world()
    cached_outside(it)
    monkeypatch.setattr(external(it), "poll", _never)
    waiting, other = it.add(14), it.add([9, 9, 9])
    it.step_until(lambda plan: other in plan.num_scheduled_tokens)
    assert not it.receipts[waiting].outputs
    (request,) = [r for r in it.scheduler._state.waiting if r.request_id == waiting]
    assert not request.kv.num_blocks


def test_a_slow_load_times_out_and_its_request_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    it = world(max_fill_wait_s=2.0)
    cached_outside(it)
    monkeypatch.setattr(external(it), "poll", _never)
    slow = it.add(14)
    it.step()
    it.wait(1.9)
    assert slow not in it.step().num_scheduled_tokens
    it.wait(0.2)
    it.step_until(lambda plan: it.finish_reason(slow))
    assert served_tokens(it, slow) == {}
    monkeypatch.undo()
    it.run_to_end()


def test_loads_reserve_at_most_half_of_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = world(max_fill_wait_s=2.0)
    prompts = [[number] * 17 for number in range(1, 8)]
    for prompt in prompts:
        it.add(prompt)
        it.run_to_end()
    it.evict_cached()
    monkeypatch.setattr(external(it), "poll", _never)

    for prompt in prompts:
        name = it.add(prompt)
        it.step()
        it.wait(2.1)
        it.step_until(lambda plan, name=name: it.finish_reason(name))  # type: ignore[misc]

    # Four blocks each. The stores of new blocks do not end either.
    assert len(external(it).loads) == 4
    reserved = set(it.scheduler._state.arrivals.holds.block_ids())
    assert len(reserved) <= 16 + 8
    assert it.scheduler.stats().num_free_blocks == 32 - len(reserved)
    monkeypatch.undo()
    it.run_to_end()


def test_a_failed_load_falls_back_to_computing() -> None:
    it = world()
    cached_outside(it)
    again = it.add(14)
    it.step_until(lambda plan: plan.kv_orders.external.loads)
    external(it).blocks.clear()
    it.run_to_end()
    assert served_tokens(it, again) == {}


def test_a_load_interrupted_by_a_reset_is_not_cached() -> None:
    it = world()
    cached_outside(it)
    again = it.add(14)
    it.step_until(lambda plan: plan.kv_orders.external.loads)
    contents = dict(external(it).blocks)
    it.scheduler.reset_prefix_cache()
    assert not external(it).blocks
    external(it).blocks = contents  # a cache that answers although it was cleared
    it.run_to_end()
    assert served_tokens(it, again) == {}
    served = it.receipts[again].outputs[-1].served
    assert served is not None
    assert served.num_cached_tokens == 0


def test_a_preempted_request_loads_its_stored_blocks() -> None:
    it = world(num_blocks=9)
    for token in (1, 2):
        it.add([token] * 12, max_tokens=1)
    it.run_to_end()
    names = [it.add([1] * 12, max_tokens=12), it.add([2] * 12, max_tokens=12)]
    it.step_until(lambda _: it.scheduler.stats().total_preemptions)
    it.evict_cached()
    it.run_to_end()
    assert external(it).num_loaded
    # The prompts were in the prefix cache at first.
    assert [served_tokens(it, name) for name in names] == [{}, {}]


def test_tiers_drop_the_kv_of_a_failed_request() -> None:
    it = world()
    name = it.add(14, max_tokens=8)
    it.step_until(lambda plan: plan.kv_orders.external.stores)
    it.fail_next_token(name)
    it.run_to_end()
    assert not external(it).blocks


def test_a_load_that_would_take_longer_than_computing_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = world()
    cached_outside(it)
    it.scheduler._planner.budget.pace.record_step(
        0.1, 0, 0
    )  # no step with prompt tokens: nothing is learnt
    it.scheduler._planner.budget.pace.record_step(12.0, 0, 12)  # a second for a token
    monkeypatch.setattr(external(it), "load_s", lambda _: 12.1)
    again = it.add(14)
    it.run_to_end()
    assert served_tokens(it, again) == {}
    it.evict_cached()
    monkeypatch.setattr(external(it), "load_s", lambda _: 11.9)
    again = it.add(14)
    it.run_to_end()
    assert served_tokens(it, again) == {"host": 12}


def test_requests_with_prompt_logprobs_load_nothing() -> None:
    it = world()
    cached_outside(it)
    again = it.add(14, sampling=SamplingParams(max_tokens=2, prompt_logprobs=1))
    it.run_to_end()
    assert served_tokens(it, again) == {}


def test_requests_with_another_salt_load_nothing() -> None:
    it = world()
    cached_outside(it)
    again = it.add(14, cache_salt="tenant")
    it.run_to_end()
    assert served_tokens(it, again) == {}


def test_a_request_whose_loaded_blocks_are_evicted_while_it_waits_loads_them_again() -> None:
    it = world()
    cached_outside(it)
    running = [it.add(3, max_tokens=40) for _ in range(4)]  # the batch is full
    it.step()
    again = it.add(14)
    it.step_until(lambda plan: plan.kv_orders.external.loads)
    it.step_until(lambda _: not external(it).loads)
    it.step()
    it.evict_cached()
    it.abort(running[0])
    it.run_to_end()

    assert external(it).num_loaded == 2 * 3
    assert served_tokens(it, again) == {"host": 12}
    served = it.receipts[again].outputs[-1].served
    assert served is not None
    assert served.num_prefilled_tokens == 2


def test_a_load_waits_for_the_blocks_reserved_by_another_load() -> None:
    it = world(num_blocks=64)
    prompts = [[first, *range(1, 70)] for first in (1, 2)]
    for prompt in prompts:
        it.add(prompt)
    it.run_to_end()
    it.evict_cached()
    it.step()
    names = [it.add(prompt) for prompt in prompts]
    it.run_to_end()

    assert [served_tokens(it, name) for name in names] == [{"host": 68}] * 2


def test_a_large_load_starts_once_earlier_small_loads_have_finished() -> None:
    it = world(num_blocks=100)
    large, small = [20, *range(1, 162)], [[21 + n, *range(1, 42)] for n in range(40)]
    for prompt in (*small[:20], large, *small[20:]):
        it.add(prompt, max_tokens=1)
        it.run_to_end()
    it.evict_cached()
    it.let_loads_take(lambda: 0.45)

    names = [it.add(small[n], max_tokens=1) for n in range(3)]
    it.step()
    late = it.add(large, max_tokens=1)
    for number in range(3, 200):
        if it.finish_reason(late):
            break
        names.append(it.add(small[number % 40], max_tokens=1))
        steps(it, 2)
        it.wait(0.1)

    assert it.finish_reason(late)
    assert it.now_s < 2.0
    assert served_tokens(it, late) == {"host": 160}
    it.let_loads_take(lambda: 0.0)
    it.run_to_end()


def test_one_deadline_covers_the_wait_for_blocks_and_the_load() -> None:
    it = world(num_blocks=64, max_fill_wait_s=2.0)
    prompts = [[first, *range(1, 70)] for first in (1, 2)]
    for prompt in prompts:
        it.add(prompt)
        it.run_to_end()
    it.evict_cached()
    it.let_loads_take(lambda: 1.5)

    first, second = (it.add(prompt) for prompt in prompts)
    for _ in range(21):
        steps(it, 2)
        it.wait(0.1)

    assert it.finish_reason(first)
    it.step_until(lambda _: it.receipts[second].outputs, max_steps=2)
    assert [served_tokens(it, first), it.receipts[second].outputs[0].first_index] == [
        {"host": 68},
        0,
    ]
    it.let_loads_take(lambda: 0.0)
    it.run_to_end()
    assert served_tokens(it, second) == {}


def test_an_aborted_request_that_waits_for_blocks_delays_no_other() -> None:
    it = world(num_blocks=64)
    large, small = [1, *range(2, 122)], [[first, *range(1, 14)] for first in (30, 40)]
    for prompt in (large, *small):
        it.add(prompt)
        it.run_to_end()
    it.evict_cached()
    it.let_loads_take(lambda: 1.0)

    it.add(small[0])
    it.step()
    aborted = it.add([*large, 3])
    it.step()
    it.abort(aborted)
    it.add(small[1])
    it.step()

    assert len(external(it).loads) == 2
    it.let_loads_take(lambda: 0.0)
    it.run_to_end()


def test_a_request_with_lost_kv_keeps_its_queue_position_while_its_prefix_loads() -> None:
    it = world(num_blocks=64)
    cached_outside(it)
    running = [it.add([9, n], max_tokens=40) for n in range(4)]  # the batch is full
    it.step()
    lost = it.add(14, receives=True, arrival_s=2.0)
    it.step_until(lambda _: it.wire.incoming)
    earlier = it.add([8] * 3, arrival_s=1.0)
    it.wire.lose(HandoffId(lost, 1))
    it.step_until(lambda _: external(it).num_loaded)
    it.step()

    it.abort(running[0])

    assert [row.request_id for row in it.step().started] == [lost]
    it.run_to_end()
    assert served_tokens(it, lost) == {"host": 12}
    assert it.finish_reason(earlier)


@pytest.mark.parametrize("groups", [None, WINDOWED])
@pytest.mark.parametrize("num_state_blocks", [0, 2])
def test_a_hand_off_carries_only_blocks_missing_in_the_tiers_of_the_decode_node(
    groups: tuple[KvGroup, ...] | None, num_state_blocks: int
) -> None:
    it = world(groups=groups, num_state_blocks=num_state_blocks, num_blocks=64)
    cached_outside(it)

    again = it.add(14, receives=True)
    loading = it.step()
    granting = it.step_until(lambda plan: plan.kv_orders.receives)
    it.run_to_end()

    assert loading.kv_orders.external.loads
    assert not loading.kv_orders.receives
    (receive,) = granting.kv_orders.receives
    assert receive.num_cached_tokens == 12
    assert served_tokens(it, again) == {"host": 12}
    served = it.receipts[again].outputs[-1].served
    assert served is not None
    assert (served.num_received_tokens, served.num_prefilled_tokens) == (2, 0)


def test_a_receiver_does_not_wait_for_a_load_slower_than_receiving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = world()
    cached_outside(it)
    monkeypatch.setattr(external(it), "load_s", lambda _: 0.001)  # a gigabyte is received in 1 s

    again = it.add(14, receives=True)
    plan = it.step()
    it.wire.lose(HandoffId(again, 1))
    it.run_to_end()

    assert [each.num_cached_tokens for each in plan.kv_orders.receives] == [0]
    assert served_tokens(it, again) == {"host": 12}  # rather than computing it


def test_a_grant_waits_for_a_slow_load_up_to_the_fill_deadline() -> None:
    it = world(max_fill_wait_s=2.0)
    cached_outside(it)
    it.let_loads_take(lambda: 9.0)
    it.add(14, receives=True)
    it.step()

    it.wait(1.9)
    before = it.step()
    it.wait(0.1)
    (receive,) = it.step().kv_orders.receives

    assert not before.kv_orders.receives
    assert receive.num_cached_tokens == 0
    it.wait(9.0)
    it.run_to_end()


def test_a_load_before_a_grant_leaves_free_blocks_to_running_requests() -> None:
    it = world(num_blocks=7, remote_headroom_blocks=4)
    cached_outside(it)
    running = it.add([9, 9], max_tokens=16)
    it.step()

    it.add(14, receives=True)  # with its three blocks, only three would be free
    plans = [it.step() for _ in range(8)]

    assert not any(plan.kv_orders.external.loads for plan in plans)
    assert it.scheduler.stats().total_preemptions == 0
    it.step_until(lambda _: it.finish_reason(running))
    it.run_to_end()


def test_a_prefix_of_recurrent_layers_is_loaded_up_to_a_snapshot() -> None:
    it = world(num_state_blocks=2)
    cached_outside(it, prompt=18)
    again = it.add(18)
    it.run_to_end()
    # Snapshots are due at multiples of two blocks, and at the last whole block of the prompt.
    assert served_tokens(it, again) == {"host": 4 * BLOCK_SIZE}
    assert it.num_snapshots


@pytest.mark.parametrize("is_snapshot", [True, False])
def test_a_snapshot_without_its_block_shortens_the_prefix_to_an_earlier_snapshot(
    is_snapshot: bool,
) -> None:
    it = world(num_state_blocks=2)
    cached_outside(it, prompt=18)
    blocks = external(it).blocks
    # Four blocks of tokens fill the prompt, and two snapshots have two parts each.
    del blocks[[name for name in blocks if (len(name) > HASH_BYTES) == is_snapshot][3]]
    again = it.add(18)
    it.run_to_end()
    assert served_tokens(it, again) == {"host": 2 * BLOCK_SIZE}


def test_a_partially_loaded_snapshot_is_not_cached() -> None:
    it = world(num_state_blocks=2)
    cached_outside(it, prompt=18)
    num_before = it.num_snapshots
    outside = external(it)
    again = it.add(18)
    it.step()
    (load,) = outside.loads
    del outside.blocks[load.names[-1]]
    it.run_to_end()
    assert not num_before
    assert served_tokens(it, again) == {}
    served = it.receipts[again].outputs[-1].served
    assert served is not None
    assert served.num_prefilled_tokens == 18


def test_a_block_is_stored_with_the_hints_and_the_tenant_of_its_request() -> None:
    it = world()
    hints = KvHints(session_id="chat", retain_s=60.0, priority=80)
    it.add(14, cache_salt="a salt", kv_hints=hints)
    it.run_to_end()

    stored = set(external(it).stored_hints.values())
    assert stored == {BlockHints(tenant_of("a salt"), 60.0, 80, is_in_session=True)}


def test_prefix_hits_are_reported_as_uses_from_the_end_of_the_prefix() -> None:
    it = world()
    it.add(14)
    it.run_to_end()
    assert not external(it).uses

    it.add(14)
    it.run_to_end()

    names = list(external(it).stored_hints)
    (use,) = external(it).uses
    assert use.names == (names[2], names[1], names[0])
    assert use.hints.is_plain


def test_uses_name_the_blocks_that_the_request_computed_before_its_hits() -> None:
    it = world()
    it.add(10, max_tokens=1)
    it.run_to_end()
    it.add(18, max_tokens=20, kv_hints=KvHints(priority=80))
    it.run_to_end()

    names = list(external(it).stored_hints)
    (use,) = external(it).uses
    assert use.names[-4:] == (names[3], names[2], names[1], names[0])


def test_session_hits_evicted_from_a_tier_are_stored_again() -> None:
    it = world()
    it.add(14, max_tokens=2)
    it.run_to_end()
    external(it).blocks.clear()

    it.add(14, max_tokens=2)
    it.run_to_end()
    assert not external(it).blocks
    it.add(14, max_tokens=2, kv_hints=KvHints(session_id="chat"))
    it.run_to_end()

    assert len(external(it).blocks) == 3


def test_a_request_with_the_release_hint_stores_nothing_and_releases_its_stored_blocks() -> None:
    it = world()
    it.add(14, max_tokens=2)
    it.run_to_end()
    it.add(18, max_tokens=2, kv_hints=KvHints(release=True))
    it.run_to_end()

    (use,) = external(it).uses
    assert use.hints.is_released
    assert set(use.names) == set(external(it).blocks)
    assert len(use.names) == 3


def test_a_prefetch_loads_the_prefix_for_the_next_request() -> None:
    it = world()
    cached_outside(it)
    prefetch = it.add(14, kv_hints=KvHints(prefetch=True))
    it.run_to_end()
    assert served_tokens(it, prefetch) == {"host": 12}
    assert it.finish_reason(prefetch) is FinishReason.LENGTH

    again = it.add(14)
    it.run_to_end()

    served = it.receipts[again].outputs[-1].served
    assert served is not None
    assert (served.num_cached_tokens, served.loaded_tokens) == (12, {})


def test_a_prefetch_of_an_unknown_prompt_ends_without_computing_it() -> None:
    it = world()
    prefetch = it.add(14, kv_hints=KvHints(prefetch=True, retain_s=60.0))
    assert not it.step().num_scheduled_tokens
    it.run_to_end()
    assert it.finish_reason(prefetch) is FinishReason.LENGTH


def test_many_prefetches_are_spread_over_several_steps() -> None:
    it = world(num_blocks=4096)
    decoding = it.add(14, max_tokens=20)
    it.step_until(lambda _: it.tokens(decoding))
    num_tokens = MAX_LOOKED_UP_TOKENS // 8
    flood = [it.add(num_tokens, kv_hints=KvHints(prefetch=True)) for _ in range(20)]
    num_ended = []
    for _ in range(3):
        num_decoded = len(it.tokens(decoding))
        it.step()
        num_ended.append(sum(it.finish_reason(one) is not None for one in flood))
        assert len(it.tokens(decoding)) == num_decoded + 1

    assert num_ended == [8, 16, 20]


def test_many_requests_that_wait_for_one_load_are_spread_over_several_steps() -> None:
    it = world(num_blocks=4096)
    num_tokens = MAX_LOOKED_UP_TOKENS // 8
    cached_outside(it, num_tokens)
    for _ in range(20):
        it.add(num_tokens)
    it.step()

    assert it.scheduler.is_cut_short
    it.run_to_end()


@pytest.mark.parametrize(("tiers", "kept"), [(("kv",), 12), (("host",), 0), ((), 0)])
def test_each_tier_can_be_reset_alone(tiers: tuple[str, ...], kept: int) -> None:
    it = world()
    it.add(14)
    it.run_to_end()
    it.step()

    num_blocks = it.scheduler.reset_prefix_cache(tiers)

    assert num_blocks == dict.fromkeys(tiers or ("kv", "host"), 4)
    it.evict_cached()
    again = it.add(14)
    it.run_to_end()
    assert served_tokens(it, again).get("host", 0) == kept


def steps(it: EngineWorld, count: int) -> None:
    for _ in range(count):
        it.step()


def _never() -> ExternalReports:
    return NO_EXTERNAL_REPORTS
