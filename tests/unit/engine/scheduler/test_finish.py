"""End of requests: stop rules, limits, errors, aborts, and their outputs."""

from __future__ import annotations

from functools import partial

from baton.core.ids import RequestId
from baton.core.output import Failure, FinishReason, Output
from baton.core.sampling import SamplingParams
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from tests.support.engine_world import EngineWorld
from tests.support.requests import make_engine_request
from tests.support.scheduler_state import is_idle

_config = partial(SchedulerConfig, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


def test_a_stop_token_ends_a_request_and_is_reported() -> None:
    world, name = _world_stopping_at(place=2)

    world.run_to_end()

    last = world.receipts[name].outputs[-1]
    assert last.finish_reason is FinishReason.STOP
    assert last.stop_token_id == world.tokens(name)[-1]
    assert len(world.tokens(name)) == 3


def test_stop_tokens_are_ignored_before_min_tokens() -> None:
    world, name = _world_stopping_at(place=2, min_tokens=5)

    world.run_to_end()

    assert len(world.tokens(name)) >= 5


def test_ignore_eos_ignores_eos_but_not_stop_tokens_of_the_client() -> None:
    prompt = [5, 4, 3]
    answer, _ = EngineWorld().alone(make_engine_request(prompt, max_tokens=8))
    eos, stop = answer[1], next(token for token in answer if token not in answer[:2])
    world = EngineWorld(_config(eos_token_ids=frozenset({eos})))
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=(stop,))
    name = world.add(prompt, sampling=sampling)

    world.run_to_end()

    assert world.tokens(name) == answer[: answer.index(stop) + 1]
    assert world.finish_reason(name) is FinishReason.STOP


def test_max_model_len_ends_a_request() -> None:
    world = EngineWorld(_config(max_model_len=10))
    name = world.add(7, max_tokens=50)

    world.run_to_end()

    assert len(world.tokens(name)) == 3
    assert world.finish_reason(name) is FinishReason.LENGTH


def test_prior_output_tokens_count_as_output() -> None:
    world = EngineWorld()
    name = world.add(3, prior=[1, 2], max_tokens=5)

    world.run_to_end()

    outputs = world.receipts[name].outputs
    assert [output.first_index for output in outputs] == [2, 3, 4]


def test_a_runner_error_of_one_request_ends_only_that_request() -> None:
    world = EngineWorld()
    bad, good = world.add([1, 2, 3], max_tokens=6), world.add([4, 5, 6], max_tokens=6)
    world.step()

    world.fail_next_token(bad)
    world.step()

    last = world.receipts[bad].outputs[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.failure == Failure("the logits are not finite")
    world.run_to_end()
    assert world.finish_reason(good) is FinishReason.LENGTH


def test_logprobs_are_emitted_with_their_tokens() -> None:
    world = EngineWorld()
    name = world.add(3, sampling=SamplingParams(max_tokens=3, logprobs=1))

    world.run_to_end()

    outputs = world.receipts[name].outputs
    named = [logprobs.token_id for output in outputs for logprobs in output.logprobs]
    assert named == world.tokens(name)


def test_prompt_logprobs_are_emitted_chunk_by_chunk() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=4))
    name = world.add(10, sampling=SamplingParams(max_tokens=1, prompt_logprobs=1))

    world.run_to_end()

    parts = [output.prompt_logprobs for output in world.receipts[name].outputs]
    assert [len(part) for part in parts] == [4, 4, 2, 0]
    assert parts[0][0] is None


# --- speculation ------------------------------------------------------------------


def test_accepted_tokens_are_emitted_at_once_and_rejected_slots_are_rewritten() -> None:
    world = EngineWorld(_config(num_lookahead_tokens=3), block_size=2)
    name = world.add(3, max_tokens=20)

    world.run_to_end()

    lengths = [len(output.token_ids) for output in world.receipts[name].outputs]
    assert len({*lengths}) > 1
    stats = world.scheduler.stats()
    assert sum(stats.proposed_by_position) == stats.total_proposed_tokens
    assert sum(stats.accepted_by_position) == stats.total_accepted_tokens
    # The first tokens of drafts are accepted as often as outputs have more than one.
    assert stats.accepted_by_position[0] == sum(length > 1 for length in lengths)


def test_slots_for_draft_tokens_are_always_allocated() -> None:
    world = EngineWorld(_config(num_lookahead_tokens=3), block_size=2)
    world.add(3, max_tokens=20)

    world.step()
    plan = world.step()

    # Three tokens are there; the fourth and three more may be written: seven slots.
    assert [len(table) for (table,) in plan.new_block_ids.values()] == [2]
    world.run_to_end()


def test_lookahead_slots_are_clipped_to_the_end_of_the_request() -> None:
    """Lookahead exceeds a block and the prompt is one token below the limit: no block too many."""
    config = _config(num_lookahead_tokens=9, max_model_len=16)
    world = EngineWorld(config, num_blocks=4, block_size=4)
    at_model_limit = world.add(14, max_tokens=50)
    world.run_to_end()
    at_own_limit = world.add(4, max_tokens=3)
    world.step()

    plan = world.step()

    assert len(world.tokens(at_model_limit)) == 2
    # Four slots of the prompt, and two more: the third token is never an input.
    assert [len(table) for (table,) in plan.new_block_ids.values()] == [1]
    world.run_to_end()
    assert len(world.tokens(at_own_limit)) == 3


def test_a_prompt_gets_the_budget_minus_one_token_per_decoding_request() -> None:
    config = SchedulerConfig(max_num_batched_tokens=512, num_lookahead_tokens=8)
    world = EngineWorld(config, num_blocks=300)
    for number in range(20):
        world.add([number % 7], max_tokens=90)
    world.step()
    long = world.add(600, max_tokens=1)

    plan = world.step()

    assert (plan.num_scheduled_tokens[long], plan.max_draft_tokens) == (512 - 20, 0)
    world.run_to_end()


def test_drafts_get_the_remaining_budget() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=7, num_lookahead_tokens=3))
    for _ in range(4):
        world.add(1, max_tokens=9)

    plans = [world.step(), world.step()]

    assert [plan.max_draft_tokens for plan in plans] == [0, 3]
    world.run_to_end()


def test_tokens_after_the_stop_token_are_dropped() -> None:
    scheduler = Scheduler(_config(num_lookahead_tokens=3), CacheConfig(8))
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(7,))
    scheduler.add(make_engine_request(sampling=sampling))
    _answer(scheduler, [5])

    (output,) = _answer(scheduler, [6, 7, 8, 9])

    assert output.token_ids == (6, 7)
    assert output.stop_token_id == 7
    scheduler.check()


# --- abort ------------------------------------------------------------------------


def test_an_abort_in_the_waiting_queue_ends_the_request_at_once() -> None:
    world = EngineWorld(_config(max_num_seqs=1))
    running, waiting = world.add(), world.add()
    world.step()

    world.abort(waiting)
    world.step()

    assert world.finish_reason(waiting) is FinishReason.ABORT
    assert world.scheduler.stats().num_waiting == 0
    world.run_to_end()
    assert world.finish_reason(running) is FinishReason.LENGTH


def test_aborting_a_running_request_releases_its_blocks_and_drops_its_row() -> None:
    world = EngineWorld()
    name = world.add(9)
    world.step()

    world.abort(name)
    free = world.scheduler.stats().num_free_blocks
    plan = world.step()

    assert free == world.cache_config.num_blocks
    assert plan == Plan(dropped=(name,))
    world.run_to_end()


def test_aborting_during_chunked_prefill_releases_the_blocks() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=4))
    name = world.add(10)
    world.step()

    world.abort(name)

    world.run_to_end()
    assert world.tokens(name) == []


def test_a_token_for_a_request_that_was_aborted_while_the_step_ran_is_dropped() -> None:
    scheduler = Scheduler(_config(), CacheConfig(8))
    request = make_engine_request()
    scheduler.add(request)
    plan = scheduler.schedule(0.0)

    scheduler.abort(request.request_id)
    scheduler.add(request)  # the same name again, at once
    outputs = scheduler.update(plan, RunResult({request.request_id: [1]}))

    (output,) = outputs
    assert output.finish_reason is FinishReason.ABORT
    again = scheduler.schedule(0.0)
    assert again.dropped == (request.request_id,)
    assert [row.token_ids for row in again.started] == [request.prompt_token_ids]
    scheduler.check()


def test_aborting_an_unknown_request_does_nothing() -> None:
    world = EngineWorld()

    world.abort(RequestId("never seen"))

    assert is_idle(world.scheduler)


def test_abort_all_ends_running_and_waiting_requests() -> None:
    scheduler = Scheduler(_config(), CacheConfig(8))
    scheduler.add(make_engine_request(request_id="a"))
    plan = scheduler.schedule(0.0)
    scheduler.add(make_engine_request(request_id="b"))

    scheduler.abort_all()

    assert scheduler.request_ids() == ()
    outputs = scheduler.update(plan, RunResult({RequestId("a"): [1]}))
    assert [(each.request_id, each.finish_reason) for each in outputs] == [
        ("a", FinishReason.ABORT),
        ("b", FinishReason.ABORT),
    ]
    scheduler.check()


def _world_stopping_at(place: int, min_tokens: int = 0) -> tuple[EngineWorld, RequestId]:
    """Return a world with one request, whose token at `place` is the end-of-text token."""
    prompt = [5, 4, 3]
    answer, _ = EngineWorld().alone(make_engine_request(prompt, max_tokens=8))
    assert answer[place] not in answer[:place]
    world = EngineWorld(_config(eos_token_ids=frozenset({answer[place]})))
    return world, world.add(prompt, sampling=SamplingParams(max_tokens=8, min_tokens=min_tokens))


def _answer(scheduler: Scheduler, token_ids: list[int]) -> list[Output]:
    """Run one step in which every scheduled request gets these tokens."""
    plan = scheduler.schedule(0.0)
    run = RunResult(dict.fromkeys(plan.num_scheduled_tokens, token_ids))
    return scheduler.update(plan, run)
