"""What a decode step costs the engine's thread beside the model: scheduling, preparing, telling.

CPU time of that one thread, taken at the borders of what it calls. What Python does between the
kernels of the forward pass counts as forward pass; the angles of the positions count as preparing.
Threads of torch that spin until the others have come do so where they are: where neighbours take
their cores, one thread is what to measure with.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import ParamSpec, TypeVar

from engine.core import EngineCore
from engine.runner.runner import TorchRunner

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of one step, apart from each other."""

    scheduling_s: float  # schedule and update, which makes the outputs
    preparing_s: float  # the batch for the pass, and the result behind it
    sampling_s: float
    forward_s: float  # and the logits


@dataclass(frozen=True, slots=True)
class StepCost:
    """Medians over the steps."""

    kernels: str  # as asked for
    quantize: str
    batch: int
    overhead_ms: float  # scheduling and preparing
    scheduling_ms: float
    preparing_ms: float
    sampling_ms: float
    forward_ms: float


class _Clock:
    """The CPU time that this thread spends inside of what it is put around."""

    def __init__(self) -> None:
        self._spent_s = 0.0

    def around(self, call: Callable[P, T]) -> Callable[P, T]:
        def timed(*given: P.args, **named: P.kwargs) -> T:
            began_s = thread_time()
            try:
                return call(*given, **named)
            finally:
                self._spent_s += thread_time() - began_s

        return timed

    def taken(self) -> float:
        """Since the last time."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


class StepMeter:
    """Puts clocks into an engine, for good."""

    def __init__(self, engine: EngineCore, runner: TorchRunner) -> None:
        self._engine = engine
        self._running, self._forward, self._sampling = _Clock(), _Clock(), _Clock()
        decoder, sampler = runner.decoder, runner.sampler
        runner.run = self._running.around(runner.run)  # type: ignore[method-assign]
        decoder.forward = self._forward.around(decoder.forward)  # type: ignore[method-assign]
        decoder.logits = self._forward.around(decoder.logits)  # type: ignore[method-assign]
        sampler.choose = self._sampling.around(sampler.choose)  # type: ignore[method-assign]

    def step(self) -> Spent:
        began_s = thread_time()
        self._engine.step()
        whole_s = thread_time() - began_s
        running_s = self._running.taken()
        forward_s, sampling_s = self._forward.taken(), self._sampling.taken()
        return Spent(
            scheduling_s=whole_s - running_s,
            preparing_s=running_s - forward_s - sampling_s,
            sampling_s=sampling_s,
            forward_s=forward_s,
        )


def step_cost(kernels: str, quantize: str, batch: int, steps: Sequence[Spent]) -> StepCost:
    def median_ms(of: Callable[[Spent], float]) -> float:
        return statistics.median(of(one) for one in steps) * 1e3

    return StepCost(
        kernels,
        quantize,
        batch,
        overhead_ms=median_ms(lambda one: one.scheduling_s + one.preparing_s),
        scheduling_ms=median_ms(lambda one: one.scheduling_s),
        preparing_ms=median_ms(lambda one: one.preparing_s),
        sampling_ms=median_ms(lambda one: one.sampling_s),
        forward_ms=median_ms(lambda one: one.forward_s),
    )
