"""Scheduling of models with recurrent layers: sides, snapshots, prefix hits and hand-offs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from baton.core.errors import InvalidConfig, InvalidRequest
from baton.core.ids import RequestId
from baton.core.output import FinishReason
from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from baton.engine.kv_cache.groups import CacheConfig, CacheLayout
from baton.engine.plan import BlockIds, Plan, PlanRow, StateBlocks
from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from baton.engine.scheduler.validation import max_sequence_length, validate_request
from tests.support.engine_world import EngineWorld
from tests.support.fake_runner import CrashPlace
from tests.support.requests import make_engine_request

N = 2  # state blocks
BLOCK_SIZE = 4
INTERVAL = N * BLOCK_SIZE  # between snapshots
_config = partial(SchedulerConfig, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


def test_the_state_sides_swap_with_each_chunk_and_each_decoded_token() -> None:
    world = _world(_config(max_num_batched_tokens=6))
    name = world.add(11, max_tokens=5)
    current = []

    while world.finish_reason(name) is None:
        world.step()
        current += [_state(row).sides[0] for row in world.scheduler.running_rows().values()]

    first, second = current[:2]
    assert current == [second if place % 2 else first for place in range(len(current))]
    assert len(current) == 2 + 4 - 1
    world.run_to_end()


def test_state_blocks_are_counted() -> None:
    world = _world()
    world.add(9, max_tokens=9)
    world.step()

    held = {name: each.num_held for name, each in world.scheduler.stats_by_group().items()}
    assert held == {"0 full": 3, "state": 2 * N}
    world.run_to_end()


def test_snapshot_hits_and_evictions_are_counted() -> None:
    world = _world(num_blocks=16)
    for _ in range(2):
        world.add(9, max_tokens=1)
        world.run_to_end()
    hit = world.scheduler.stats_by_group()
    world.add([7] * 30, max_tokens=1)  # takes all but two blocks
    world.run_to_end()

    evicted = world.scheduler.stats_by_group()
    assert {name: (each.total_hits, each.total_evictions) for name, each in hit.items()} == {
        "0 full": (2, 0),
        "state": (N, 0),
    }
    assert evicted["state"].total_evictions == N
    assert evicted["0 full"].total_evictions


def test_a_prompt_takes_snapshots_at_intervals_and_at_its_last_reusable_block() -> None:
    world = _world()
    name = world.add(24, max_tokens=1)

    plan = world.step()

    assert _positions(plan, name) == [8, 16, 20, 24]
    world.run_to_end()


def test_each_chunk_takes_the_snapshots_within_its_tokens() -> None:
    world = _world(_config(max_num_batched_tokens=9))
    name = world.add(22, max_tokens=1)

    assert [_positions(world.step(), name) for _ in range(3)] == [[8], [16], [20]]
    world.run_to_end()


def test_decoding_takes_a_snapshot_at_each_interval_and_none_at_its_end() -> None:
    world = _world()
    name = world.add(6, max_tokens=20)
    positions = []

    while world.finish_reason(name) is None:
        positions.append((world.tokens(name)[-1:], _positions(world.step(), name)))

    taken = [(place, found) for place, (_, found) in enumerate(positions) if found]
    assert taken == [(0, [4]), (2, [8]), (10, [16]), (18, [24])]
    world.run_to_end()


def test_the_last_computed_token_can_take_a_snapshot() -> None:
    world = _world()
    name = world.add(INTERVAL - 3, max_tokens=4)  # the last token is never an input

    positions = [_positions(world.step(), name) for _ in range(4)]

    assert positions == [[4], [], [], [INTERVAL]]
    world.run_to_end()


def test_a_landed_request_takes_snapshots_at_intervals() -> None:
    world = _world()
    name = world.add(13, receives=True, max_tokens=9)
    world.step()
    world.wire.settle()
    world.step()

    assert [_positions(world.step(), name) for _ in range(4)] == [[], [], [16], []]
    world.run_to_end()


def test_with_few_free_blocks_the_last_snapshot_position_has_precedence() -> None:
    world = _world(num_blocks=6 + 3 * N)
    name = world.add(24, max_tokens=1)

    plan = world.step()

    assert _positions(plan, name) == [20]
    world.run_to_end()


def test_without_free_blocks_a_request_runs_without_snapshots() -> None:
    world = _world(num_blocks=7 + 3 * N, enable_prefix_caching=True)
    blocker = world.add(7, max_tokens=1, receives=True)  # two blocks and both sides
    name = world.add(11, max_tokens=1)

    plan = world.step()

    assert world.finish_reason(blocker) is None
    assert plan.num_scheduled_tokens == {name: 11}
    assert not plan.state_copies
    world.run_to_end()


def test_a_prefix_hit_holds_its_snapshot_until_the_first_pass_is_applied() -> None:
    world = _world()
    world.add(14, max_tokens=1)  # snapshots at 8 and 12
    world.run_to_end()
    cached = world.num_snapshots

    name = world.add(11, max_tokens=2)
    [row] = world.step().started

    assert cached == 2
    assert row.num_computed_tokens == 8  # two blocks; a third is cached, too
    assert len(_state(row).snapshot) == N
    [row] = world.scheduler.running_rows().values()
    assert _state(row).snapshot == ()
    world.run_to_end()
    served = world.receipts[name].outputs[-1].served
    assert served is not None
    assert served.num_cached_tokens == 8


def test_a_repeated_prompt_hits_all_its_full_blocks() -> None:
    for num_tokens in (12, 13, 15):
        world = _world()
        names = []
        for _ in range(2):
            names.append(world.add(num_tokens, max_tokens=1))
            world.run_to_end()

        served = world.receipts[names[1]].outputs[-1].served
        assert served is not None
        assert served.num_cached_tokens == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("budget", [64, 9])
def test_the_third_prompt_hits_the_snapshot_where_the_second_diverged_from_the_first(
    budget: int,
) -> None:
    world = _world(_config(max_num_batched_tokens=budget))
    num_cached, taken = [], []
    for tail in (1, 2, 3):
        name = world.add([7] * 21 + [tail] * 9, max_tokens=1)
        plans: list[Plan] = []
        while world.finish_reason(name) is None:
            plans.append(world.step())
        taken.append([n for plan in plans for n in _positions(plan, name)])
        served = world.receipts[name].outputs[-1].served
        assert served is not None
        num_cached.append(served.num_cached_tokens)

    # The third one shares five blocks, and hits them: it takes no other snapshot before its end.
    assert num_cached == [0, 16, 20]
    assert taken == [[8, 16, 24, 28], [20, 24, 28], [24, 28]]
    world.run_to_end()


def test_a_prefix_shorter_than_an_interval_is_hit_by_the_third_prompt() -> None:
    world = _world()
    for tail in (1, 2, 3):
        name = world.add([7] * 5 + [tail] * 9, max_tokens=1)
        world.run_to_end()

    served = world.receipts[name].outputs[-1].served
    assert served is not None
    assert served.num_cached_tokens == BLOCK_SIZE


def test_with_few_free_blocks_the_snapshot_of_a_shared_prefix_has_precedence() -> None:
    world = _world(num_blocks=10 + 3 * N)
    world.add([7] * 13 + [1] * 9, max_tokens=1)
    world.run_to_end()
    name = world.add([7] * 13 + [2] * 17, max_tokens=1)

    plan = world.step()

    assert _positions(plan, name) == [12]
    world.run_to_end()


def test_a_preempted_request_resumes_from_its_longest_snapshot() -> None:
    config = _config(max_num_seqs=1, policy=SchedulingPolicy.PRIORITY)
    world = _world(config, num_blocks=64)
    name = world.add(9, max_tokens=12, priority=1)
    world.step_until(lambda _: len(world.tokens(name)) == 10)
    world.add([5] * 3, max_tokens=1, priority=0)

    resumed = world.step_until(lambda plan: name in [row.request_id for row in plan.started])

    [row] = resumed.started
    assert (row.num_computed_tokens, len(_state(row).snapshot)) == (16, N)
    world.run_to_end()


def test_a_request_that_fails_leaves_no_snapshot() -> None:
    world = _world(_config(max_num_batched_tokens=9))
    name = world.add(22, max_tokens=4)
    world.fail_next_token(name)

    world.run_to_end()

    assert world.finish_reason(name) is FinishReason.ERROR
    assert world.num_snapshots == 0
    again = world.add(22, max_tokens=4)
    world.run_to_end()
    assert world.finish_reason(again) is FinishReason.LENGTH


def test_aborting_a_request_during_a_pass_drops_its_snapshots() -> None:
    world = _world()
    world.add(22, max_tokens=4)
    plan = world.scheduler.schedule(0.0)
    run = world.runner.run(plan)
    world.scheduler.check()  # the snapshots are held

    world.scheduler.abort(RequestId("r0"))
    world.scheduler.update(plan, run)

    world.scheduler.check()
    assert world.num_snapshots == 0
    assert world.scheduler.stats().num_free_blocks == world.scheduler.stats().num_blocks


def test_a_reset_removes_snapshots_and_those_in_progress_are_not_cached() -> None:
    world = _world()
    world.add(9, max_tokens=1)
    world.run_to_end()
    assert world.num_snapshots == 1
    name = world.add([3] * 7, max_tokens=20)
    world.step()

    world.scheduler.reset_prefix_cache()
    world.run_to_end()

    assert world.finish_reason(name) is FinishReason.LENGTH
    assert world.num_snapshots == 0


def test_snapshots_of_a_pass_interrupted_by_a_reset_are_not_cached() -> None:
    world = _world()
    world.add(22, max_tokens=1)
    plan = world.scheduler.schedule(0.0)
    run = world.runner.run(plan)

    world.scheduler.reset_prefix_cache()
    world.scheduler.update(plan, run)

    assert plan.state_copies
    assert world.num_snapshots == 0
    world.scheduler.check()


@pytest.mark.parametrize("place", CrashPlace)
def test_a_repeated_pass_uses_the_snapshots_and_hits_of_the_failed_one(place: CrashPlace) -> None:
    world = _world()
    world.add(14, max_tokens=1)
    world.run_to_end()
    hitting = world.add(15, max_tokens=10)
    other = world.add([5] * 13, max_tokens=10)
    culprit = world.add([7] * 9)
    world.crash(culprit, place)

    plan = world.step()

    assert _positions(plan, other) == [8, 12]
    assert world.finish_reason(culprit) is FinishReason.ERROR
    world.run_to_end()
    assert world.finish_reason(hitting) is FinishReason.LENGTH
    for prompt, num_cached in ([5] * 14, 12), ([7] * 10, 0):
        name = world.add(prompt, max_tokens=3)
        world.run_to_end()
        served = world.receipts[name].outputs[-1].served
        assert served is not None
        assert served.num_cached_tokens == num_cached


# --- hand-offs -------------------------------------------------------------------------


def test_state_blocks_are_granted_even_if_all_token_blocks_are_cached() -> None:
    world = _world()
    orders = []
    for _ in range(2):
        world.add(8, receives=True, max_tokens=1)
        [order] = world.step().kv_orders.receives
        orders.append((order.first_block, len(order.block_ids)))
        world.run_to_end()

    assert orders == [(0, 2 + N), (2, N)]


@pytest.mark.parametrize("push_layers", [False, True])
@pytest.mark.parametrize("num_tokens", [5, 11, 12, 13])
def test_the_current_state_side_is_sent_with_the_last_blocks(
    num_tokens: int, push_layers: bool
) -> None:
    world = _world(_config(max_num_batched_tokens=6, push_layers=push_layers))
    world.add(num_tokens, sends=True)
    sides: list[BlockIds] = []
    plans: list[Plan] = []

    while not (plans and plans[-1].kv_orders.completes):
        sides += [_state(row).sides[0] for row in world.scheduler.running_rows().values()]
        plans.append(world.step())

    sends = [send for plan in plans for send in plan.kv_orders.sends]
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    assert sum(len(send.block_ids) for send in sends) == num_blocks + N
    assert sends[-1].block_ids[-N:] not in sides[-1:]  # the last pass wrote the other side
    by_layer = [order for plan in plans for order in plan.kv_orders.layer_sends]
    assert sum(len(order.block_ids) for order in by_layer) == num_blocks * push_layers
    world.run_to_end()


# --- limits ----------------------------------------------------------------------------

CACHE = CacheConfig(12, BLOCK_SIZE, CacheLayout(num_state_blocks=N))


def test_the_longest_request_includes_its_state_blocks() -> None:
    longest = max_sequence_length(_config(), CACHE)
    without_cache = replace(CACHE, enable_prefix_caching=False)

    assert longest == (12 - 3 * N) * BLOCK_SIZE + 1
    assert max_sequence_length(_config(), without_cache) == (12 - 2 * N) * BLOCK_SIZE + 1
    validate_request(make_engine_request([1], max_tokens=longest - 1), _config(), CACHE)
    with pytest.raises(InvalidRequest, match=r"13 KV blocks \(6 of them for the recurrent state"):
        validate_request(make_engine_request([1], max_tokens=longest), _config(), CACHE)


def test_the_longest_prompt_is_admitted_again_while_its_snapshot_is_cached() -> None:
    world = _world(num_blocks=12)
    for _ in range(2):
        world.add((12 - 3 * N) * BLOCK_SIZE, max_tokens=1)
        world.run_to_end()

    assert world.scheduler.stats().total_prefix_hit_tokens > 0


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"at least 7: 6 for the recurrent state"):
        replace(CACHE, num_blocks=6)


# --- events ----------------------------------------------------------------------------


def test_cache_changes_name_the_blocks_that_end_at_a_snapshot() -> None:
    world = _world()
    world.add(22, max_tokens=1)
    world.run_to_end()

    events = world.take_kv_events()

    assert world.cache_config.naming.needs_snapshot
    ends = [event.token_ids for event in events if isinstance(event, BlockStored)]
    assert ends == [tuple(n % 11 for n in range(end - 4, end)) for end in (8, 16, 20)]
    assert len(events) == 3


def test_cache_changes_name_evicted_and_reset_snapshots() -> None:
    world = _world(num_blocks=16)
    world.add(13, max_tokens=1)
    world.run_to_end()
    stored = _names(world.take_kv_events(), BlockStored)
    world.add([8] * 30, max_tokens=1)
    world.run_to_end()

    assert len(stored) == 2
    assert _names(world.take_kv_events(), BlockRemoved) >= stored
    world.scheduler.reset_prefix_cache()
    assert world.take_kv_events() == (AllBlocksCleared(),)


def _names(events: tuple[KvEvent, ...], kind: type[BlockStored | BlockRemoved]) -> set[bytes]:
    return {name for event in events if isinstance(event, kind) for name in event.block_hashes}


def _world(
    config: SchedulerConfig | None = None,
    *,
    num_blocks: int = 64,
    enable_prefix_caching: bool = True,
) -> EngineWorld:
    return EngineWorld(
        config or _config(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_state_blocks=N,
        enable_prefix_caching=enable_prefix_caching,
    )


def _positions(plan: Plan, name: RequestId) -> list[int]:
    return [snapshot.num_tokens for snapshot in plan.state_copies.get(name, ())]


def _state(row: PlanRow) -> StateBlocks:
    assert row.state is not None
    return row.state
