"""Observation of engine steps: order of the calls, and steps that fail."""

from __future__ import annotations

from itertools import pairwise

import pytest

from baton.core.ids import HandoffId, RequestId
from baton.engine.plan import Plan, RunResult, StepObserver, StepRecord
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.records import TransferRecord, TransferRole
from baton.kv_transfer.types import KvOrders, KvReports
from tests.support.engine_world import EngineWorld
from tests.support.engines import VOCAB_SIZE, an_engine, an_engine_request
from tests.support.fake_runner import Crash, CrashPlace, FakeRunner, KvTensor, SynchronousRunner
from tests.support.scheduler_state import is_idle

RECORD = TransferRecord(HandoffId("a", 1), TransferRole.SENT, "memory", 1.0)


class Noting(StepObserver):
    """Observer that appends its calls to a list, which runner and KV worker share."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self.plans: list[Plan] = []
        self.passes: list[Plan] = []
        self.ended: list[StepRecord] = []

    def note_plan(self, plan: Plan, now_s: float) -> None:
        self._calls.append("note plan")
        self.plans.append(plan)

    def note_pass(self, plan: Plan, began_s: float, ended_s: float) -> None:
        self._calls.append("note pass")
        self.passes.append(plan)
        assert began_s <= ended_s

    def note_end(self, step: StepRecord) -> None:
        self._calls.append("note end")
        self.ended.append(step)


class CalledRunner(SynchronousRunner):
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self.fake = FakeRunner(KvTensor(64, 4), VOCAB_SIZE)

    def run(self, plan: Plan) -> RunResult:
        self._calls.append("run")
        return self.fake.run(plan)


class CalledKvWorker(KvDriver):
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def start(self, orders: KvOrders, now: float) -> None:
        self._calls.append("start")

    def poll(self, now: float) -> KvReports:
        self._calls.append("poll")
        return super().poll(now)

    def take_records(self) -> tuple[TransferRecord, ...]:
        self._calls.append("take records")
        return (RECORD,)


def test_a_step_is_observed_before_its_pass_after_its_pass_and_at_its_end() -> None:
    calls: list[str] = []
    observer = Noting(calls)
    runner, worker = CalledRunner(calls), CalledKvWorker(calls)
    engine = an_engine(runner=runner, drivers=[worker], observers=[observer])
    engine.scheduler.add(an_engine_request(prompt=(1, 2, 3)))

    engine.step()

    before, after = ["start", "note plan", "run", "note pass"], ["poll", "take records", "note end"]
    assert calls == before + after
    [step], [plan] = observer.ended, observer.plans
    assert step.plan is plan is observer.passes[0]
    assert step.transfers == (RECORD,)
    assert all(one <= other for one, other in pairwise(step.times_s))


def test_without_observers_records_stay_with_the_kv_worker() -> None:
    calls: list[str] = []
    engine = an_engine(drivers=[CalledKvWorker(calls)])

    engine.step()

    assert calls == ["start", "poll"]


def test_a_step_that_runs_nothing_is_observed_without_a_pass() -> None:
    calls: list[str] = []
    engine = an_engine(observers=[Noting(calls)])

    engine.step()

    assert calls == ["note plan", "note end"]


def test_only_successful_parts_of_a_failed_pass_are_observed() -> None:
    calls: list[str] = []
    observer, runner = Noting(calls), CalledRunner(calls)
    runner.fake.crashing = {RequestId("c"): CrashPlace.PASS}
    engine = an_engine(runner=runner, observers=[observer])
    for name in "abc":
        engine.scheduler.add(an_engine_request(name))

    engine.step()

    computed = [set(plan.num_scheduled_tokens) for plan in observer.passes if plan.started]
    assert computed == [{"a"}, {"b"}]
    assert all(plan.is_retry and not plan.num_prompt_tokens for plan in observer.passes)
    assert set(observer.plans[0].num_scheduled_tokens) == {"a", "b", "c"}
    assert calls.count("note plan") == calls.count("note end") == 1


def test_the_plan_of_a_pass_that_ends_the_engine_is_observed() -> None:
    calls: list[str] = []
    runner = CalledRunner(calls)
    runner.fake.crashing = {RequestId(name): CrashPlace.PASS for name in "abcd"}
    engine = an_engine(runner=runner, observers=[Noting(calls)])
    for name in "abcd":
        engine.scheduler.add(an_engine_request(name))

    with pytest.raises(Crash):
        engine.step()

    assert calls[:2] == ["note plan", "run"]
    assert "note end" not in calls


def test_a_plan_counts_the_prompt_tokens_among_its_tokens() -> None:
    observer = Noting([])
    engine = an_engine(observers=[observer])
    engine.scheduler.add(an_engine_request("a", prompt=(1, 2, 3, 4, 5), max_tokens=3))
    engine.step()
    engine.scheduler.add(an_engine_request("b", prompt=(6, 7), max_tokens=2))
    for _ in range(2):
        engine.step()

    assert [plan.num_prompt_tokens for plan in observer.plans] == [5, 2, 0]


def test_recomputed_output_tokens_are_not_prompt_tokens() -> None:
    world = EngineWorld(num_blocks=4, block_size=4, enable_prefix_caching=False)
    for _ in range(2):
        world.add(6, max_tokens=8)
    plans = []
    while not is_idle(world.scheduler):
        plans.append(world.step())

    resumed = [row for plan in plans for row in plan.started if len(row.token_ids) > 6]
    num_started = sum(len(plan.started) for plan in plans)
    assert resumed
    assert sum(plan.num_prompt_tokens for plan in plans) == 6 * num_started
