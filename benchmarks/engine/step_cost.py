"""Overhead of a decode step on the engine thread: scheduling, batch preparation, output.

The figures are CPU time of that thread, measured at call boundaries. Python between the kernels of
the forward pass counts as forward pass; position embeddings count as preparation. Torch threads
that wait for each other spin, so measure with one thread if other load shares the cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import ParamSpec, TypeVar

from baton.engine.core import EngineCore
from baton.engine.plan import Pending
from baton.engine.runner.model_runner import TorchRunner

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of one step, by phase."""

    scheduling_s: float  # schedule, and update, which makes the outputs
    preparing_s: float  # batch of the pass, and its result
    sampling_s: float
    forward_s: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """Medians over the steps."""

    kernels: str
    quantize: str
    activation_dtype: str
    batch: int
    overhead_ms: float  # scheduling and preparing
    scheduling_ms: float
    preparing_ms: float
    sampling_ms: float
    forward_ms: float


class _Clock:
    """CPU time that this thread spends in the wrapped callables."""

    def __init__(self) -> None:
        self._spent_s = 0.0

    def wrap(self, call: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            began_s = thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._spent_s += thread_time() - began_s

        return timed

    def take(self) -> float:
        """Return the time since the last call, and reset."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


class _TimedPass:
    """Implements `Pending`."""

    def __init__(self, pending: Pending, clock: _Clock) -> None:
        self.allows = pending.allows
        self.collect = clock.wrap(pending.collect)


class StepMeter:
    """Measures the steps of an engine; its clocks cannot be removed again."""

    def __init__(self, engine: EngineCore, runner: TorchRunner) -> None:
        self._engine = engine
        self._running, self._forward, self._sampling = _Clock(), _Clock(), _Clock()
        decoder, sampler = runner.decoder, runner.sampler
        launch = self._running.wrap(runner.launch)
        runner.launch = lambda plan: _TimedPass(launch(plan), self._running)  # type: ignore[method-assign]
        decoder.forward = self._forward.wrap(decoder.forward)  # type: ignore[method-assign]
        decoder.logits = self._forward.wrap(decoder.logits)  # type: ignore[method-assign]
        sampler.begin = self._sampling.wrap(sampler.begin)  # type: ignore[method-assign]
        sampler.launch = self._sampling.wrap(sampler.launch)  # type: ignore[method-assign]
        sampler.read = self._sampling.wrap(sampler.read)  # type: ignore[method-assign]

    def step(self) -> Spent:
        began_s = thread_time()
        self._engine.step()
        whole_s = thread_time() - began_s
        running_s = self._running.take()
        forward_s, sampling_s = self._forward.take(), self._sampling.take()
        return Spent(
            scheduling_s=whole_s - running_s,
            preparing_s=running_s - forward_s - sampling_s,
            sampling_s=sampling_s,
            forward_s=forward_s,
        )


def step_cost(
    kernels: str, quantize: str, activation_dtype: str, batch: int, steps: Sequence[Spent]
) -> StepCost:
    def median_ms(of: Callable[[Spent], float]) -> float:
        return statistics.median(of(one) for one in steps) * 1e3

    return StepCost(
        kernels,
        quantize,
        activation_dtype,
        batch,
        overhead_ms=median_ms(lambda one: one.scheduling_s + one.preparing_s),
        scheduling_ms=median_ms(lambda one: one.scheduling_s),
        preparing_ms=median_ms(lambda one: one.preparing_s),
        sampling_ms=median_ms(lambda one: one.sampling_s),
        forward_ms=median_ms(lambda one: one.forward_s),
    )
