"""Time between passes: the share of time in which a device waits for the engine.

The device computes a pass in a fixed time, in which it needs no CPU, and every request gets the
same token. Outputs are delivered to nobody. Requests either decode without end, or end after
`ANSWER_TOKENS`, and as many arrive with each step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.core import EngineCore
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Pending, Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from benchmarks.engine.scheduler import BLOCK_SIZE, NUM_STEPS, answer, full_scheduler

NUM_PROMPT_TOKENS = 128
ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PassGaps:
    """Medians over the steps of one setting."""

    num_running: int
    arrivals_per_step: int
    async_scheduling: bool
    pass_ms: float
    gap_ms: float
    idle_share: float


class TimedDevice:
    """Implements `Runner`. Passes take a fixed time, and begin when the one before has ended."""

    def __init__(self, pass_s: float) -> None:
        self._pass_s = pass_s
        self._ended_s = 0.0
        self.gaps_s: list[float] = []

    def launch(self, plan: Plan) -> Pending:
        began_s = max(self._ended_s, time.perf_counter())
        self.gaps_s.append(began_s - self._ended_s)
        self._ended_s = began_s + self._pass_s
        return _TimedPass(answer(plan), self._ended_s)


@dataclass(frozen=True, slots=True)
class _TimedPass:
    """Implements `Pending`."""

    result: RunResult
    end_s: float

    def allows(self, plan: Plan) -> bool:
        return bool(plan.num_scheduled_tokens)

    def collect(self) -> RunResult:
        time.sleep(max(0.0, self.end_s - time.perf_counter()))
        return self.result


def run(num_running: Sequence[int], pass_s: float) -> list[PassGaps]:
    """Measure with and without arrivals, and with and without asynchronous scheduling."""
    return [
        _measure(count, num_arrivals, pass_s, async_scheduling=is_async)
        for count in num_running
        for num_arrivals in (0, max(1, count // ANSWER_TOKENS))
        for is_async in (False, True)
    ]


def _measure(
    num_running: int, num_arrivals: int, pass_s: float, *, async_scheduling: bool
) -> PassGaps:
    if num_arrivals:
        scheduler = _busy_scheduler(num_running)
    else:
        scheduler = full_scheduler(num_running, 0, NUM_PROMPT_TOKENS, kv_events=False)
    scheduler.config = replace(scheduler.config, async_scheduling=async_scheduling)
    device = TimedDevice(pass_s)
    engine = EngineCore(scheduler, device)
    num_warm_up = 2 * ANSWER_TOKENS if num_arrivals else 1
    for step in range(num_warm_up + NUM_STEPS):
        for number in range(num_arrivals):
            scheduler.add(_request(step * num_arrivals + number))
        engine.step()
    engine.close()
    gap_s = statistics.median(device.gaps_s[num_warm_up:])
    idle_share = gap_s / (gap_s + pass_s)
    return PassGaps(
        num_running, num_arrivals, async_scheduling, 1e3 * pass_s, 1e3 * gap_s, idle_share
    )


def _busy_scheduler(num_running: int) -> Scheduler:
    """Return a scheduler with room for somewhat more requests than run at a time."""
    max_num_seqs = num_running + num_running // 4
    num_tokens = NUM_PROMPT_TOKENS + ANSWER_TOKENS + BLOCK_SIZE
    return Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=max_num_seqs * (NUM_PROMPT_TOKENS + 1),
            max_num_seqs=max_num_seqs,
            max_model_len=num_tokens,
        ),
        CacheConfig(num_blocks=2 * max_num_seqs * num_tokens // BLOCK_SIZE, block_size=BLOCK_SIZE),
    )


def _request(number: int) -> EngineRequest:
    # Of different lengths, so that blocks do not all fill up in the same step.
    prompt = (number + 1, *range(1, NUM_PROMPT_TOKENS - number % BLOCK_SIZE))
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS)
    return EngineRequest(RequestId(f"arrival-{number}"), prompt, sampling, seed=0)
