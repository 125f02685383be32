"""Preemption: choice of the victim and its resumption."""

from __future__ import annotations

from functools import partial

from baton.core.kv_hints import KvHints
from baton.core.sampling import SamplingParams
from baton.engine.plan import Plan
from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from tests.support.engine_world import EngineWorld

_config = partial(SchedulerConfig, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


def test_the_request_that_arrived_last_is_preempted() -> None:
    world = EngineWorld(_config(), num_blocks=4, block_size=4)
    first, last = world.add(8, max_tokens=8), world.add([9] * 8, max_tokens=8)
    world.step()

    plan = world.step()

    assert plan.dropped == (last,)
    assert plan.num_scheduled_tokens == {first: 1}
    assert world.scheduler.stats().total_preemptions == 1
    world.run_to_end()


def test_a_preempted_request_with_the_release_hint_finds_its_cached_blocks() -> None:
    config = _config(policy=SchedulingPolicy.PRIORITY, max_num_seqs=1)
    world = EngineWorld(config, num_blocks=12, block_size=4)
    world.add([9] * 16)
    world.run_to_end()
    released = world.add(14, priority=1, kv_hints=KvHints(release=True))
    world.step()
    world.add([8] * 20)  # evicts blocks that were used longer ago

    world.run_to_end()

    served = world.receipts[released].outputs[-1].served
    assert served is not None
    assert served.num_preemptions == 1
    assert served.num_prefilled_tokens == 14 + 4  # behind three cached blocks


def test_draft_tokens_preempt_no_request() -> None:
    """Each has a free slot in its last block, but no block is free for three draft tokens."""
    world = EngineWorld(_config(num_lookahead_tokens=3), num_blocks=4, block_size=4)
    first, last = world.add(7, max_tokens=8), world.add([9] * 7, max_tokens=8)
    world.step()

    plan = world.step()

    assert plan.num_scheduled_tokens == {first: 1, last: 1}
    assert world.scheduler.stats().total_preemptions == 0
    world.run_to_end()


def test_the_running_request_of_lowest_priority_is_preempted() -> None:
    world = EngineWorld(_config(policy=SchedulingPolicy.PRIORITY), num_blocks=4, block_size=4)
    lax, urgent = world.add(8, priority=1, max_tokens=8), world.add([9] * 8, max_tokens=8)
    world.step()

    plan = world.step()

    assert plan.dropped == (lax,)
    assert plan.num_scheduled_tokens == {urgent: 1}
    world.run_to_end()


def test_the_lowest_ranked_request_preempts_itself() -> None:
    world = EngineWorld(_config(), num_blocks=4, block_size=4)
    first, last = world.add(6, max_tokens=10), world.add([9] * 8, max_tokens=6)
    world.step()

    plan = world.step()

    assert plan.dropped == (last,)
    assert plan.num_scheduled_tokens == {first: 1}
    world.run_to_end()


def test_a_resumed_request_is_scheduled_before_new_ones() -> None:
    world = EngineWorld(_config(max_num_seqs=2), num_blocks=4, block_size=4)
    first, last = world.add(8, max_tokens=3), world.add([9] * 8, max_tokens=8)
    newcomer = world.add([7], max_tokens=2)
    world.step()
    world.step()

    order = [row.request_id for _ in range(4) for row in world.step().started]

    assert order[0] == last
    assert newcomer in order
    world.run_to_end()
    assert world.tokens(first)


def test_no_new_request_gets_blocks_of_a_request_preempted_in_the_same_step() -> None:
    world = EngineWorld(_config(policy=SchedulingPolicy.PRIORITY), num_blocks=4, block_size=4)
    world.add(8, priority=1, max_tokens=8)
    world.add([9] * 8, priority=1, max_tokens=8)
    world.step()
    urgent = world.add([7], priority=0, max_tokens=2)

    at_preemption, after = world.step(), world.step()

    assert urgent not in at_preemption.num_scheduled_tokens
    assert urgent in after.num_scheduled_tokens
    world.run_to_end()


def test_a_resumed_request_recomputes_its_uncached_output() -> None:
    world = EngineWorld(_config(), num_blocks=5, block_size=4, enable_prefix_caching=False)
    world.add(8, max_tokens=8)
    victim = world.add([9] * 7, max_tokens=8)
    world.step_until(lambda plan: plan.dropped)
    known = 7 + len(world.tokens(victim))
    plan = world.step_until(lambda plan: plan.started)

    (row,) = plan.started
    assert (row.request_id, len(row.token_ids), row.num_computed_tokens) == (victim, known, 0)
    assert row.num_prompt_tokens == 7
    world.run_to_end()


def test_blocks_of_a_preempted_request_stay_cached() -> None:
    world = EngineWorld(_config(), num_blocks=8, block_size=2)
    world.add([1] * 8, max_tokens=3)
    victim = world.add([9] * 7, max_tokens=3)
    world.step_until(lambda plan: plan.dropped)
    plan = world.step_until(lambda plan: plan.started)

    (row,) = plan.started
    assert row.request_id == victim
    assert row.num_computed_tokens == 6
    world.run_to_end()


def test_without_chunks_one_that_outgrew_the_budget_is_resumed_in_chunks() -> None:
    config = _config(max_num_batched_tokens=8, enable_chunked_prefill=False)
    world = EngineWorld(config, num_blocks=5, block_size=4, enable_prefix_caching=False)
    world.add(4, max_tokens=12)
    victim = world.add([9] * 4, max_tokens=12)
    world.step_until(lambda plan: plan.dropped)
    plan = world.step_until(lambda plan: plan.started)

    (row,) = plan.started
    assert len(row.token_ids) > 8
    assert plan.num_scheduled_tokens == {victim: 8}
    world.run_to_end()


def test_a_preempted_request_can_be_aborted() -> None:
    world = EngineWorld(_config(), num_blocks=4, block_size=4)
    world.add(8, max_tokens=8)
    victim = world.add([9] * 8, max_tokens=8)
    world.step_until(lambda plan: plan.dropped)

    world.abort(victim)

    world.run_to_end()


def test_prompt_logprobs_are_emitted_once_despite_preemption() -> None:
    world = EngineWorld(_config(), num_blocks=4, block_size=4)
    world.add(8, max_tokens=8)
    sampling = SamplingParams(max_tokens=8, prompt_logprobs=1)
    victim = world.add([9] * 8, sampling=sampling)

    world.run_to_end()

    outputs = [output for output in world.receipts[victim].outputs if output.prompt_logprobs]
    count = 0
    for output in outputs:
        assert output.first_prompt_index == count
        count += len(output.prompt_logprobs)
    assert count == 8
    assert world.scheduler.stats().total_preemptions > 0


def test_a_lone_running_request_is_preempted_while_the_other_blocks_are_in_flight() -> None:
    """The plan has no tokens, but the engine must not sleep."""
    config = _config(remote_headroom_blocks=0)
    world = EngineWorld(config, num_blocks=4, block_size=4)
    running = world.add([9] * 7, max_tokens=6)
    world.step()
    world.add(8, receives=True, max_tokens=2)
    world.step()

    plan = world.step()

    assert plan == Plan(dropped=(running,))
    world.run_to_end()


def test_a_request_that_just_fits_into_the_cache_is_never_preempted() -> None:
    world = EngineWorld(_config(), num_blocks=4, block_size=4)
    world.add(8, max_tokens=9)

    plans = [world.step() for _ in range(9)]

    assert world.scheduler.stats().total_preemptions == 0
    assert Plan() not in plans
    world.run_to_end()
