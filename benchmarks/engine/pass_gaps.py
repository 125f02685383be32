"""Time between passes: the share of time in which a device waits for the engine.

The device computes a pass in a fixed time, in which it needs no CPU, and every request gets the
same token. Requests decode and do not end. Outputs are delivered to nobody.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.engine.core import EngineCore, NoKvWorker
from baton.engine.plan import Pending, Plan, RunResult
from benchmarks.engine.scheduler import NUM_STEPS, answer, full_scheduler

NUM_PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class PassGaps:
    """Medians over the steps of one setting."""

    num_running: int
    async_scheduling: bool
    pass_ms: float
    gap_ms: float  # between two passes
    idle_share: float  # of the device


class TimedDevice:
    """Implements `Runner`. Passes take a fixed time."""

    def __init__(self, pass_s: float) -> None:
        self._pass_s = pass_s
        self._ended_s = 0.0
        self.gaps_s: list[float] = []

    def launch(self, plan: Plan) -> Pending:
        began_s = time.perf_counter()
        self.gaps_s.append(began_s - self._ended_s)
        result = answer(plan)
        time.sleep(max(0.0, began_s + self._pass_s - time.perf_counter()))
        self._ended_s = time.perf_counter()
        return _Computed(result)


class _Computed:
    """Implements `Pending`."""

    def __init__(self, result: RunResult) -> None:
        self._result = result

    def collect(self) -> RunResult:
        return self._result


def run(num_running: Sequence[int], pass_s: float) -> list[PassGaps]:
    """Measure with and without asynchronous scheduling."""
    return [
        _measure(count, pass_s, async_scheduling=is_async)
        for count in num_running
        for is_async in (False, True)
    ]


def _measure(num_running: int, pass_s: float, *, async_scheduling: bool) -> PassGaps:
    scheduler = full_scheduler(num_running, 0, NUM_PROMPT_TOKENS, kv_events=False)
    scheduler.config = replace(scheduler.config, async_scheduling=async_scheduling)
    device = TimedDevice(pass_s)
    engine = EngineCore(scheduler, device, NoKvWorker())
    for _ in range(NUM_STEPS):
        engine.step()
    engine.close()
    gap_s = statistics.median(device.gaps_s[1:])
    return PassGaps(
        num_running, async_scheduling, 1e3 * pass_s, 1e3 * gap_s, gap_s / (gap_s + pass_s)
    )
