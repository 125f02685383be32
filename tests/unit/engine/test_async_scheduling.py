"""Asynchronous scheduling: the next decodes are planned while a pass is computed."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from baton.core.ids import HandoffId, RequestId
from baton.core.output import Failure, FailureCause, FinishReason
from baton.core.sampling import SamplingParams
from baton.engine.core import EngineCore
from baton.engine.errors import FollowedPassFailed, OutOfOrder, PassSkipped
from baton.engine.kv_cache.groups import CacheConfig, CacheLayout
from baton.engine.pass_thread import PassThread
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import STATE_LOST, Scheduler
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.types import NO_KV_ORDERS
from tests.support.engine_world import EngineWorld
from tests.support.engines import VOCAB_SIZE, an_engine_request
from tests.support.fake_runner import (
    Crash,
    CrashPlace,
    FakePass,
    FakeRunner,
    KvTensor,
    run_plan,
    tokens_alone,
)
from tests.support.waits import await_value

ASYNC = SchedulerConfig(max_num_seqs=8, vocab_size=VOCAB_SIZE, async_scheduling=True)
PATIENCE_S = 30
MAX_STEPS = 99


def world(config: SchedulerConfig | None = None, num_state_blocks: int = 0) -> EngineWorld:
    return EngineWorld(config, num_state_blocks=num_state_blocks, runs_ahead=True)


def an_engine(runner: FakeRunner, *drivers: KvDriver) -> EngineCore:
    layout = CacheLayout(num_state_blocks=runner.num_state_blocks)
    scheduler = Scheduler(ASYNC, CacheConfig(64, 4, layout))
    return EngineCore(scheduler, runner, drivers)


def a_fake(num_state_blocks: int = 0) -> FakeRunner:
    return FakeRunner(KvTensor(64, 4), VOCAB_SIZE, num_state_blocks=num_state_blocks)


def answer_of(number: int, num_state_blocks: int = 0) -> list[int]:
    """Return the tokens of a request of `tokens_of`."""
    return tokens_alone((1, number), 0, 9, VOCAB_SIZE, num_state_blocks=num_state_blocks)


def tokens_of(engine: EngineCore, num_requests: int) -> dict[str, list[int]]:
    """Run requests to their end."""
    for number in range(num_requests):
        engine.scheduler.add(an_engine_request(str(number), prompt=(1, number), max_tokens=9))
    found: dict[str, list[int]] = {str(number): [] for number in range(num_requests)}
    for _ in range(MAX_STEPS):
        if not engine.scheduler.request_ids():
            break
        for output in engine.step():
            found[output.request_id] += output.token_ids
    engine.close()
    engine.scheduler.check()
    return found


def test_all_steps_but_the_first_are_planned_ahead() -> None:
    it = world()
    it.add(6, max_tokens=9)

    it.run_to_end()

    assert it.num_ahead["all"] == it.num_ahead["decodes"] == 8
    assert 0 < it.runner.num_followed < 8  # those that were launched early


def test_drafts_are_planned_ahead_for_positions_that_are_not_known_yet() -> None:
    it = world(SchedulerConfig(num_lookahead_tokens=2))
    it.add(6, max_tokens=30)

    it.run_to_end()

    assert it.num_ahead["drafts"] > 8
    assert it.scheduler.stats().total_accepted_tokens > 0


def test_passes_that_can_have_no_drafts_are_launched_early() -> None:
    it = world(SchedulerConfig(num_lookahead_tokens=2))
    it.runner.max_rows = 2
    for number in range(3):
        it.add(6, max_tokens=9 + 6 * (number == 0))

    it.run_to_end()

    assert it.runner.num_followed > 0  # while there are three
    assert it.scheduler.stats().total_accepted_tokens > 0  # of the last one


def test_snapshots_of_states_are_planned_before_their_names_are_known() -> None:
    it = world(num_state_blocks=1)
    it.add(6, max_tokens=9)

    it.run_to_end()

    assert it.num_ahead["snapshots"] > 0
    longer = it.add([*range(6), *it.tokens(RequestId("r0"))], max_tokens=1)
    it.run_to_end()
    served = it.receipts[longer].outputs[-1].served
    assert served is not None
    assert served.num_cached_tokens == 12


def test_prompts_are_planned_ahead_while_others_wait() -> None:
    it = world(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=6))
    for length in (20, 9, 7):
        it.add(length, max_tokens=5)

    it.run_to_end()

    assert it.num_ahead["prompts"] >= 3
    assert it.num_ahead["admissions"] >= 1


def test_a_step_that_preempts_waits_for_the_result_before_it() -> None:
    it = EngineWorld(num_blocks=4, block_size=2, runs_ahead=True)
    it.add(2, max_tokens=6)
    it.add(2, max_tokens=6)

    it.run_to_end()

    assert it.scheduler.stats().total_preemptions > 0


def test_blocks_that_a_pass_may_still_write_are_not_free() -> None:
    it = world()
    name = it.add(6, max_tokens=30)
    it.step()
    it.step()
    num_free = it.scheduler.stats().num_free_blocks

    it.abort(name)

    assert it.scheduler.stats().num_free_blocks == num_free
    it.step()
    assert it.scheduler.stats().num_free_blocks == it.scheduler.stats().num_blocks


def test_a_new_request_is_not_delayed_by_plans_ahead() -> None:
    it = world()
    it.add(6, max_tokens=30)
    for _ in range(4):
        it.step()

    late = it.add(7)

    assert late not in it.step().num_scheduled_tokens  # planned before it came
    assert late in it.step().num_scheduled_tokens


def test_a_token_after_the_end_of_a_request_is_never_seen() -> None:
    it = world()
    answer = tokens_alone(tuple(range(6)), 0, 12, 11)
    stop = answer[4]
    it.add(6, sampling=SamplingParams(max_tokens=12, stop_token_ids=(stop,)))

    it.run_to_end()

    (receipt,) = it.receipts.values()
    assert receipt.finish_reason is FinishReason.STOP
    assert receipt.token_ids == answer[: answer.index(stop) + 1]
    assert it.runner.num_computed[RequestId("r0")] == 6 + len(receipt.token_ids)


def test_an_aborted_request_in_flight_ends_at_once() -> None:
    it = world()
    name = it.add(6, max_tokens=30)
    for _ in range(4):
        it.step()

    it.abort(name)
    it.step()

    assert it.finish_reason(name) is FinishReason.ABORT
    it.run_to_end()


def test_blocks_of_an_ended_request_are_not_granted_while_a_pass_may_write_them() -> None:
    it = EngineWorld(num_blocks=4, block_size=2, runs_ahead=True)
    name = it.add(4, max_tokens=5)
    it.step()
    it.step()
    late = it.add([9] * 5, receives=True, max_tokens=2)

    it.abort(name)

    it.step()
    assert it.scheduler.stats().num_waiting == 1
    it.run_to_end()
    assert it.finish_reason(late) is FinishReason.LENGTH


def test_a_token_of_an_aborted_request_does_not_go_to_a_new_one_with_its_id() -> None:
    it = Scheduler(ASYNC, CacheConfig(num_blocks=64, block_size=4))
    runner = a_fake()
    old = an_engine_request("r", prompt=(1, 2, 3), max_tokens=9)
    new = an_engine_request("r", prompt=(7, 8, 9, 4), max_tokens=9)
    it.add(old)
    first = it.schedule(0.0)
    second = it.schedule_ahead(0.0)
    assert second is not None
    it.update(first, runner.run(first))
    it.abort(old.request_id)
    it.add(new)
    third = it.schedule_ahead(0.0)
    assert third is not None
    assert [row.token_ids for row in third.started] == [new.prompt_token_ids]

    outputs = it.update(second, runner.run(second))

    assert [(output.token_ids, output.finish_reason) for output in outputs] == [
        ((), FinishReason.ABORT)
    ]
    (output,) = it.update(third, runner.run(third))
    assert list(output.token_ids) == tokens_alone(new.prompt_token_ids, 0, 1, VOCAB_SIZE)
    it.check()


@pytest.mark.parametrize("num_steps", range(2, 7))
def test_a_pass_is_run_again_without_requests_that_start_after_it(num_steps: int) -> None:
    it = world(SchedulerConfig(max_num_seqs=3))
    other, failing, ended = [it.add(length, max_tokens=30) for length in (5, 6, 7)]
    for _ in range(num_steps):
        it.step()
    it.abort(ended)  # the pass in progress computes it, and the runner has no room for more
    later = it.add(8, max_tokens=4)
    it.crash(failing, CrashPlace.PASS)

    it.run_to_end()

    reasons = [it.finish_reason(name) for name in (other, failing, later)]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]


def test_kv_orders_do_not_wait_for_the_next_plan() -> None:
    it = Scheduler(ASYNC, CacheConfig(num_blocks=64, block_size=4))
    runner = a_fake()
    it.add(an_engine_request("a", prompt=(1, 2, 3), max_tokens=9))
    handoff_id = HandoffId("s", 1)
    sender = an_engine_request("s", prompt=(4, 5), max_tokens=9)
    it.add(replace(sender, send_to=handoff_id))
    first = it.schedule(0.0)
    assert it.schedule_ahead(0.0) is not None

    it.update(first, runner.run(first))

    orders = it.take_kv_orders()
    assert [order.handoff_id for order in orders.completes] == [handoff_id]
    assert it.take_kv_orders() == NO_KV_ORDERS


def test_a_second_plan_needs_a_first_one() -> None:
    scheduler = Scheduler(ASYNC, CacheConfig(num_blocks=64, block_size=4))

    with pytest.raises(OutOfOrder, match="no single plan"):
        scheduler.schedule_ahead(0.0)


def test_an_engine_with_a_pass_thread_gives_the_same_tokens() -> None:
    found = tokens_of(an_engine(a_fake()), 5)

    for number in range(5):
        assert found[str(number)] == tokens_alone((1, number), 0, 9, VOCAB_SIZE)


@pytest.mark.parametrize("num_state_blocks", [0, 2])
@pytest.mark.parametrize("place", CrashPlace)
def test_a_request_that_fails_passes_ends_alone(place: CrashPlace, num_state_blocks: int) -> None:
    """If its first pass is launched with the next one, all states are computed again, once."""
    runner = a_fake(num_state_blocks)
    runner.crashing = {RequestId("3"): place}
    engine = an_engine(runner)

    found = tokens_of(engine, 5)

    assert found.pop("3") == []
    for name, token_ids in found.items():
        assert token_ids == answer_of(int(name), num_state_blocks)
    is_lost = num_state_blocks and place is CrashPlace.RESULT
    assert engine.scheduler.stats().total_preemptions == (5 if is_lost else 0)


class FailsInDecode(FakeRunner):
    """Runner of which one decode fails, as by a temporary lack of memory."""

    num_decodes = num_retries = 0

    def run(self, plan: Plan) -> RunResult:
        self.num_retries += plan.is_retry and bool(plan.num_scheduled_tokens)
        self.num_decodes += not plan.num_prompt_tokens
        if self.num_decodes == 3:
            self.num_decodes += 1
            raise MemoryError
        return super().run(plan)


def test_only_the_pass_after_one_that_failed_is_run_again() -> None:
    runner = FailsInDecode(KvTensor(64, 4), VOCAB_SIZE)

    found = tokens_of(an_engine(runner), 2)

    assert runner.num_retries == 3  # each row of the failed one alone, and all of the next one
    for name, token_ids in found.items():
        assert token_ids == answer_of(int(name))


class LosesAResult(FakeRunner):
    """Runner of which one result is lost once the next pass is launched."""

    num_collected = 0

    def collect(self, launched: FakePass) -> RunResult:
        result = super().collect(launched)
        self.num_collected += 1
        if self.num_collected == 7:
            raise MemoryError
        return result


def test_states_that_the_next_pass_has_overwritten_are_computed_again_from_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = LosesAResult(KvTensor(64, 4), VOCAB_SIZE, num_state_blocks=1)
    engine = an_engine(runner)
    recompute, num_left = engine.scheduler.recompute, list[int]()

    def note_rows(request_ids: Sequence[RequestId]) -> None:
        num_left.append(len(runner._rows))
        recompute(request_ids)

    monkeypatch.setattr(engine.scheduler, "recompute", note_rows)

    found = tokens_of(engine, 2)

    assert num_left == [0]  # no pass writes their blocks when these are released
    assert runner.num_followed == 7 + 1  # up to the lost one, and the last pass
    assert engine.scheduler.stats().total_preemptions == 2
    for name, token_ids in found.items():
        assert token_ids == answer_of(int(name), 1)
        # 2 + 9 - 1 tokens, two that the lost passes computed, and those after the snapshot at 4
        assert runner.num_computed[RequestId(name)] == 10 + 2 + (8 - 4) - 1


def test_a_request_that_is_computed_again_loses_no_blocks_to_the_plans_before() -> None:
    config = replace(ASYNC, max_num_batched_tokens=8)
    it = Scheduler(config, CacheConfig(64, 4, CacheLayout(num_state_blocks=1)))
    runner = a_fake(num_state_blocks=1)
    prompt = tuple(range(20))
    it.add(an_engine_request("a", prompt=prompt, max_tokens=1))
    first, second = it.schedule(0.0), it.schedule_ahead(0.0)
    assert second is not None

    it.recompute(it.overwritten())
    it.update(first, RunResult())
    third = it.schedule_ahead(0.0)  # starts it again
    assert third is not None
    it.update(second, RunResult())
    it.check()

    outputs = it.update(third, run_plan(runner, replace(third, dropped=())))
    while it.request_ids():
        plan = it.schedule(0.0)
        outputs += it.update(plan, run_plan(runner, plan))
    tokens = [token_id for output in outputs for token_id in output.token_ids]
    assert tokens == tokens_alone(prompt, 0, 1, VOCAB_SIZE, num_state_blocks=1)


class Always(random.Random):
    """Chance of which everything comes true."""

    def random(self) -> float:
        return 0.0


def test_a_hand_off_ends_whose_state_is_overwritten_once_blocks_are_sent() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, push_layers=True)
    it = world(config, num_state_blocks=1)
    it._pass_chance = Always()  # passes are launched early
    sender = it.add(60, sends=True)
    it.step_until(lambda plan: it.scheduler._state.arrivals.sends.has_sent(HandoffId(sender, 1)))
    it.crash(sender, CrashPlace.RESULT)

    it.run_to_end()

    failure = it.receipts[sender].outputs[-1].failure
    assert failure == Failure(STATE_LOST, FailureCause.KV_LOST)


class WaitsInDecode(FakeRunner):
    """Runner whose decodes wait until the engine drives transfers."""

    may_end = threading.Event()

    def run(self, plan: Plan) -> RunResult:
        if not plan.num_prompt_tokens:
            assert self.may_end.wait(PATIENCE_S)
        return super().run(plan)


def test_the_next_step_is_planned_and_transfers_go_on_while_a_pass_is_computed() -> None:
    class Worker(KvDriver):
        def progress(self, now: float) -> None:
            num_plans.append(len(engine.scheduler._state.batch.pending))
            runner.may_end.set()

    num_plans: list[int] = []
    runner = WaitsInDecode(KvTensor(64, 4), VOCAB_SIZE)
    engine = an_engine(runner, Worker())

    tokens_of(engine, 1)

    assert num_plans[0] == 2


def test_a_pass_after_one_that_failed_is_skipped() -> None:
    runner = a_fake()
    runner.crashing = {RequestId("a"): CrashPlace.START}
    it = world()
    it.add(6, request_id="a")
    plan = it.step()
    passes = PassThread(runner)

    first = passes.launch(plan)
    second = passes.launch(replace(plan, started=()), after=first)

    with pytest.raises(PassSkipped):
        second.collect()
    passes.close()
    assert first.has_failed
    assert run_plan(runner, Plan()) == RunResult()


@pytest.mark.parametrize("num_state_blocks", [0, 2])
def test_a_pass_is_launched_before_the_result_of_the_one_before(num_state_blocks: int) -> None:
    runner = a_fake(num_state_blocks)

    found = tokens_of(an_engine(runner), 3)

    assert runner.num_followed == 8  # of nine passes
    for name, token_ids in found.items():
        assert token_ids == answer_of(int(name), num_state_blocks)


def test_a_pass_that_needs_tokens_on_the_host_waits_for_them() -> None:
    class NeedsTokens(FakeRunner):
        can_be_followed = False

    runner = NeedsTokens(KvTensor(64, 4), VOCAB_SIZE)

    found = tokens_of(an_engine(runner), 3)

    assert runner.num_followed == 0
    assert found["2"] == tokens_alone((1, 2), 0, 9, VOCAB_SIZE)


def test_calls_of_a_pass_are_dropped_with_it_if_the_result_of_the_one_before_is_lost() -> None:
    class Calls(FakeRunner):
        def run(self, plan: Plan) -> RunResult:
            passes.post(lambda: called.append(len(plan.dropped)))
            return super().run(plan)

    called: list[int] = []
    runner = Calls(KvTensor(64, 4), VOCAB_SIZE)
    runner.crashing = {RequestId("a"): CrashPlace.RESULT}
    it = world()
    it.add(6, request_id="a")
    plan = it.step()
    passes = PassThread(runner)
    first = passes.launch(plan)
    second = passes.launch(
        replace(plan, started=(), num_scheduled_tokens={RequestId("a"): 1}), after=first
    )

    for each in (first, second):
        await_value(partial(each.wait, PATIENCE_S))

    assert runner.num_followed == 1
    assert called == [0]
    with pytest.raises(FollowedPassFailed) as failure:
        first.collect()
    assert isinstance(failure.value.root, Crash)
    with pytest.raises(PassSkipped):
        second.collect()
    passes.close()


def test_a_call_after_passes_waits_for_those_that_are_not_collected() -> None:
    runner, called = a_fake(), queue.SimpleQueue[bool]()
    it = world()
    it.add(6, request_id="a")
    passes = PassThread(runner)
    passes.launch(it.step())

    passes.call_after(lambda: called.put(runner._open is None))

    assert called.get(timeout=PATIENCE_S)
    passes.close()


def test_a_pass_that_is_never_collected_has_ended_when_the_thread_is_closed() -> None:
    runner = a_fake()
    it = world()
    it.add(6, request_id="a")
    passes = PassThread(runner)
    passes.launch(it.step())

    passes.close()

    assert runner._open is None


def test_a_call_between_passes_is_made_after_those_that_are_launched() -> None:
    class Runner(FakeRunner):
        def run(self, plan: Plan) -> RunResult:
            if not may_run.wait(PATIENCE_S):
                raise TimeoutError
            order.append("pass")
            return super().run(plan)

    may_run, order = threading.Event(), list[str]()
    it = world()
    it.add(6, request_id="a")
    passes = PassThread(Runner(KvTensor(64, 4), VOCAB_SIZE))

    first = passes.launch(it.step())
    passes.call_after(lambda: order.append("call"))
    second = passes.launch(Plan())
    may_run.set()
    for each in (first, second):
        each.collect()
    passes.close()

    assert order == ["pass", "call", "pass"]


def test_histories_with_and_without_plans_ahead_give_the_same_tokens() -> None:
    for seed in range(20):
        answers = []
        for runs_ahead in (False, True):
            chance = random.Random(seed)
            it = EngineWorld(num_blocks=12, block_size=2, runs_ahead=runs_ahead)
            for _ in range(30):
                if chance.random() < 0.2:
                    it.add(chance.randint(1, 8), max_tokens=chance.randint(1, 9))
                it.step()
            it.run_to_end()
            answers.append({name: it.tokens(name) for name in it.receipts})
        assert answers[0] == answers[1]
