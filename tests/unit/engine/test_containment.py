"""Fault containment: a failing pass ends only the requests that cause the failure."""

from __future__ import annotations

import weakref

import pytest

from baton.core.ids import RequestId
from baton.core.output import Failure, FailureCause, FinishReason, Output
from baton.engine.containment import MAX_CRASHES_IN_A_ROW
from baton.engine.core import EngineCore
from baton.engine.errors import EngineStopped, PassHookFailed
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.types import KvReports
from tests.support.engine_world import EngineWorld
from tests.support.engines import VOCAB_SIZE, an_engine, an_engine_request
from tests.support.fake_runner import (
    Crash,
    CrashPlace,
    FakeRunner,
    KvTensor,
    SynchronousRunner,
    tokens_alone,
)

NUM_REQUESTS = 7


def a_fake() -> FakeRunner:
    return FakeRunner(KvTensor(64, 4), VOCAB_SIZE)


def outputs_of(engine: EngineCore) -> dict[str, list[Output]]:
    """Run all requests to their end, and return their outputs."""
    found: dict[str, list[Output]] = {}
    while engine.scheduler.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    engine.scheduler.check()
    return found


def prompt(number: int) -> tuple[int, ...]:
    return (1, 2, number)


def tokens(outputs: list[Output]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.mark.parametrize("place", CrashPlace)
@pytest.mark.parametrize("culprits", [{0}, {6}, {2, 5}])
def test_a_failed_pass_ends_only_the_requests_that_cause_it(
    culprits: set[int], place: CrashPlace
) -> None:
    runner = a_fake()
    runner.crashing = {RequestId(str(number)): place for number in culprits}
    engine = an_engine(runner=runner)
    for number in range(NUM_REQUESTS):
        engine.scheduler.add(an_engine_request(str(number), prompt=prompt(number)))

    found = outputs_of(engine)

    for number in range(NUM_REQUESTS):
        (*_, last) = outputs = found[str(number)]
        if number in culprits:
            assert last.finish_reason is FinishReason.ERROR
            assert last.failure == Failure(f"Crash: {number}", FailureCause.PASS)
        else:
            assert last.finish_reason is FinishReason.LENGTH
            assert tokens(outputs) == tokens_alone(prompt(number), 0, 4, VOCAB_SIZE)


class FailsForLackOfMemory(FakeRunner):
    """Runner whose first pass fails, and whose others need the memory that it had."""

    memory: weakref.ref[set[int]] | None = None

    def run(self, plan: Plan) -> RunResult:
        if self.memory is None:
            tensor = {1}
            self.memory = weakref.ref(tensor)
            raise MemoryError
        assert self.memory() is None
        return super().run(plan)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_pass_leaves_its_memory_to_the_passes_after_it(is_async: bool) -> None:
    config = SchedulerConfig(max_num_seqs=8, vocab_size=VOCAB_SIZE, async_scheduling=is_async)
    runner = FailsForLackOfMemory(KvTensor(64, 4), VOCAB_SIZE)
    scheduler = Scheduler(config, CacheConfig(num_blocks=64, block_size=4))
    engine = EngineCore(scheduler, runner)
    engine.scheduler.add(an_engine_request("0", prompt=prompt(0)))

    found = outputs_of(engine)
    engine.close()

    assert tokens(found["0"]) == tokens_alone(prompt(0), 0, 4, VOCAB_SIZE)


def test_a_request_that_crashes_midway_keeps_its_tokens() -> None:
    world = EngineWorld()
    bystander, culprit = world.add(max_tokens=12), world.add(7, max_tokens=12)
    for _ in range(5):
        world.step()

    world.crash(culprit, CrashPlace.PASS)
    world.run_to_end()

    assert world.finish_reason(bystander) is FinishReason.LENGTH
    assert world.finish_reason(culprit) is FinishReason.ERROR
    assert len(world.tokens(culprit)) == 5


class FailsOnce(SynchronousRunner):
    """Runner whose first pass fails, as by a temporary lack of memory."""

    def __init__(self, runner: SynchronousRunner) -> None:
        self._runner = runner
        self.is_due = True

    def run(self, plan: Plan) -> RunResult:
        if self.is_due and plan.num_scheduled_tokens:
            self.is_due = False
            self._runner.run(plan)  # half of its traces stay
            raise MemoryError("not now")
        return self._runner.run(plan)


def test_a_temporary_failure_fails_no_request() -> None:
    engine = an_engine(runner=FailsOnce(a_fake()))
    for number in range(NUM_REQUESTS):
        engine.scheduler.add(an_engine_request(str(number), prompt=prompt(number)))

    found = outputs_of(engine)

    for number in range(NUM_REQUESTS):
        assert tokens(found[str(number)]) == tokens_alone(prompt(number), 0, 4, VOCAB_SIZE)


def test_when_every_row_fails_the_engine_ends_with_the_first_failure() -> None:
    runner = a_fake()
    runner.crashing = {RequestId(str(n)): CrashPlace.PASS for n in range(NUM_REQUESTS)}
    engine = an_engine(runner=runner)
    for number in range(NUM_REQUESTS):
        engine.scheduler.add(an_engine_request(str(number)))

    with pytest.raises(Crash) as failure:
        engine.step()

    assert engine.failure is failure.value
    with pytest.raises(EngineStopped, match="Crash"):
        engine.step()


def test_successful_passes_reset_the_crash_count() -> None:
    runner = a_fake()
    engine = an_engine(runner=runner)
    for number in range(2 * MAX_CRASHES_IN_A_ROW):
        runner.crashing[RequestId(f"bad {number}")] = CrashPlace.PASS
        engine.scheduler.add(an_engine_request(f"bad {number}"))
        engine.scheduler.add(an_engine_request(f"good {number}", prompt=prompt(number)))
        found = outputs_of(engine)
        assert tokens(found[f"good {number}"]) == tokens_alone(prompt(number), 0, 4, VOCAB_SIZE)


class HookFails(SynchronousRunner):
    def run(self, plan: Plan) -> RunResult:
        raise PassHookFailed(ConnectionError("the wire broke"))


def test_a_failing_hook_ends_the_engine_instead_of_single_requests() -> None:
    engine = an_engine(runner=HookFails())
    engine.scheduler.add(an_engine_request())

    with pytest.raises(ConnectionError, match="the wire broke"):
        engine.step()


def test_every_step_after_a_failure_raises_its_cause() -> None:
    class Broken(KvDriver):
        def poll(self, now: float) -> KvReports:
            raise ZeroDivisionError("a bug of the wire")

    engine = an_engine(drivers=[Broken()])

    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(EngineStopped, match="a bug of the wire"):
        engine.step()
