"""Step pacing: prompt tokens per step, on simulated machines."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from baton.core.errors import InvalidConfig
from baton.core.ids import HandoffId, NodeId, Peer
from baton.core.request import ReceiveKv
from baton.engine.core import EngineCore
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.prompt_budget import LEAST_TOKENS, PACED_STEP_S, StepPace
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.types import KvOrders, KvReports, Lost
from tests.support.fake_runner import FakeRunner, KvTensor, SynchronousRunner
from tests.support.requests import make_engine_request

MOST = 2048


@dataclass(frozen=True)
class Machine:
    """Machine whose step takes at least the time to read the weights."""

    reading_s: float
    token_s: float

    def step_s(self, num_decoding: int, num_prompt_tokens: int) -> float:
        return max(self.reading_s, self.token_s * (num_decoding + num_prompt_tokens))


def chunks(pace: StepPace, machine: Machine, num_decoding: int, num_steps: int) -> list[int]:
    """Return the chunks of an endless prompt."""
    given = []
    for _ in range(num_steps):
        given.append(pace.prompt_tokens(num_decoding, MOST))
        pace.record_step(machine.step_s(num_decoding, given[-1]), num_decoding, given[-1])
    return given


@pytest.mark.parametrize("machine", [Machine(0.04, 0.0022), Machine(0.001, 0.0001)])
@pytest.mark.parametrize("num_decoding", [1, 8])
def test_step_times_converge_to_the_target(machine: Machine, num_decoding: int) -> None:
    pace = StepPace(0.1)
    for _ in range(10):
        pace.record_step(machine.step_s(num_decoding, 0), num_decoding, 0)

    settled = chunks(pace, machine, num_decoding, 60)[20:]

    longest = max(machine.step_s(num_decoding, chunk) for chunk in settled)
    assert longest <= 0.11
    # The time to read the weights is counted twice, so steps stay below the target.
    assert min(machine.step_s(num_decoding, chunk) for chunk in settled) >= 0.05


def test_the_chunk_shrinks_when_the_machine_slows_down() -> None:
    pace = StepPace(0.1)
    before = chunks(pace, Machine(0.001, 0.0001), 4, 40)[-1]

    after = chunks(pace, Machine(0.001, 0.001), 4, 40)[-1]

    assert before / 12 <= after <= before / 8


def test_a_prompt_finishes_on_any_machine() -> None:
    pace = StepPace(0.001)

    given = chunks(pace, Machine(5.0, 0.5), 3, 10)

    assert min(given) >= LEAST_TOKENS


def test_without_decoding_requests_or_a_target_the_whole_budget_is_used() -> None:
    slow = Machine(1.0, 0.1)

    assert set(chunks(StepPace(0.01), slow, 0, 10)) == {MOST}
    assert set(chunks(StepPace(None), slow, 5, 10)) == {MOST}


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_an_invalid_target_is_refused(wrong: float) -> None:
    with pytest.raises(InvalidConfig, match="target_step_s"):
        SchedulerConfig(target_step_s=wrong)


class TimedRunner(SynchronousRunner):
    """Runner whose steps take the time of a simulated machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._runner = FakeRunner(KvTensor(512, 16), vocab_size=100)
        self.now_s = 0.0
        self.took: list[float] = []

    def run(self, plan: Plan) -> RunResult:
        self.took.append(self._machine.step_s(sum(plan.num_scheduled_tokens.values()), 0))
        self.now_s += self.took[-1]
        return self._runner.run(plan)


def test_decoding_next_to_a_long_prompt_keeps_the_target_step_time() -> None:
    runner = TimedRunner(Machine(0.02, 0.001))
    scheduler = Scheduler(
        SchedulerConfig(target_step_s=0.1, max_num_batched_tokens=MOST), CacheConfig(num_blocks=512)
    )
    engine = EngineCore(scheduler, runner, clock=lambda: runner.now_s)
    scheduler.add(make_engine_request(request_id="short", max_tokens=500))
    for _ in range(10):
        engine.step()
    scheduler.add(make_engine_request(range(4000), request_id="long"))

    for _ in range(40):
        engine.step()

    assert max(runner.took[20:]) <= 0.11
    assert sum(runner.took[10:]) >= 3.0  # it was under way all the time


@pytest.mark.parametrize("machine", [Machine(0.04, 0.0022), Machine(0.01, 0.00005)])
def test_paced_prompts_about_double_the_time_of_a_step(machine: Machine) -> None:
    pace = StepPace(None)
    given = []

    for _ in range(20):
        pace.record_step(machine.step_s(8, 0), 8, 0)
        given.append(pace.paced_tokens(8, MOST))
        pace.record_step(machine.step_s(8, given[-1]), 8, given[-1])

    alone = machine.step_s(8, 0)
    assert given[-1] > 16
    assert all(machine.step_s(8, chunk) <= 2.5 * alone for chunk in given[5:])


def test_paced_prompts_keep_steps_short_while_no_request_decodes() -> None:
    """A request whose KV lands during a step waits for its end, with one token at its client."""
    runner = TimedRunner(Machine(0.02, 0.003))
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(num_blocks=512))
    engine = EngineCore(scheduler, runner, clock=lambda: runner.now_s)
    for number in range(3):
        prompt = range(number * 1000, number * 1000 + 512)
        request = make_engine_request(prompt, request_id=f"paced {number}", max_tokens=1)
        scheduler.add(replace(request, is_paced=True))

    while scheduler.request_ids():
        engine.step()

    assert max(runner.took) <= 1.1 * PACED_STEP_S
    assert sum(runner.took) <= 1.1 * 3 * 512 * 0.003


class LosingWorker(KvDriver):
    """KV worker whose hand-offs fail."""

    def __init__(self) -> None:
        self._ids: list[HandoffId] = []

    def start(self, orders: KvOrders, now: float) -> None:
        self._ids = [order.handoff_id for order in orders.receives]

    def poll(self, now: float) -> KvReports:
        return KvReports(
            failed_recving=tuple(Lost(handoff_id, "gave up") for handoff_id in self._ids),
            released=tuple(self._ids),
        )


def test_a_prompt_whose_hand_off_failed_does_not_delay_decoding() -> None:
    runner = TimedRunner(Machine(0.02, 0.003))
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(num_blocks=512))
    engine = EngineCore(scheduler, runner, [LosingWorker()], clock=lambda: runner.now_s)
    scheduler.add(make_engine_request(request_id="decodes", max_tokens=500))
    for _ in range(10):
        engine.step()
    request = make_engine_request(range(1000, 1512), request_id="lost", max_tokens=1)
    source = ReceiveKv(HandoffId(request.request_id, 1), Peer(NodeId("prefill"), "there"))
    scheduler.add(replace(request, receive_from=source))

    while len(scheduler.request_ids()) > 1:
        engine.step()

    assert max(runner.took) <= 0.1


@pytest.mark.parametrize("is_paced", [True, False])
@pytest.mark.parametrize("num_decoding", [0, 1])
def test_a_paced_prompt_is_computed_in_small_chunks_while_others_decode(
    is_paced: bool, num_decoding: int
) -> None:
    runner = TimedRunner(Machine(0.02, 0.001))
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(num_blocks=512))
    engine = EngineCore(scheduler, runner, clock=lambda: runner.now_s)
    for number in range(num_decoding):
        scheduler.add(make_engine_request(request_id=f"decodes {number}", max_tokens=500))
    for _ in range(10):
        engine.step()
    request = make_engine_request(range(200), request_id="paced", max_tokens=1)
    scheduler.add(replace(request, is_paced=is_paced))

    for _ in range(20):
        engine.step()

    is_cut = is_paced and num_decoding
    assert max(runner.took) <= 0.05 if is_cut else max(runner.took) >= 0.09
    assert len(scheduler.request_ids()) == num_decoding
