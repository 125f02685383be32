"""Runners on a simulated device, and engines whose passes have a thread of their own on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

from baton.engine.plan import Pending, Plan, RunResult
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.kernels.choose import TORCH, Parts
from baton.engine.runner.load import load_runner
from baton.engine.runner.model_runner import TorchRunner
from tests.support.fake_device import FakeDevice
from tests.support.static_attention import StaticPagedAttention

# Parts of which graphs can be captured.
GRAPHABLE = replace(TORCH, make_attention=StaticPagedAttention, has_static_launches=True)


def config_of(folder: Path, **settings: Any) -> RunnerConfig:
    defaults = {"kv_cache_bytes": 4 << 20, "max_model_len": 128, "max_num_seqs": 4}
    return RunnerConfig(str(folder), **(defaults | settings))


@contextmanager
def runner_on(
    device: FakeDevice, folder: Path, parts: Parts = GRAPHABLE, **settings: Any
) -> Iterator[TorchRunner]:
    with (
        device,
        load_runner(
            config_of(folder, **settings),
            make_device=lambda _: device,
            make_parts=lambda *_, **__: parts,
        ) as runner,
    ):
        yield runner


class RunnerOnThreads:
    """Runner whose passes another thread than its own can launch, on a simulated device."""

    def __init__(self, launch: Callable[[Plan], Pending], device: FakeDevice) -> None:
        self._launch = launch
        self.device = device
        self._own_thread = get_ident()
        self._newest: _PassOnThreads | None = None
        self.num_launched = self.num_collected = 0
        self.fails_at_launch: int | None = None  # counted from one
        # The first pass from this one on that is followed, counted from one: its result is lost.
        self.fails_at_collect: int | None = None
        self.results: list[RunResult] = []
        self.busy: list[bool] = []  # by collected pass: whether the device has work after it
        self.follows: list[bool] = []  # by pass: launched before the one before was collected

    def launch(self, plan: Plan) -> Pending:
        with self.computing():
            before = self._newest
            self.follows.append(before is not None and not before.is_collected)
            self.num_launched += 1
            self._newest = launched = _PassOnThreads(self, self._launch(plan))
            if self.num_launched == self.fails_at_launch:
                launched.is_collected = True
                raise MemoryError("the launch fails at its end, as the test wants")
            return launched

    def computing(self) -> AbstractContextManager[object]:
        """Compute on the device, as the thread of the test already does."""
        return nullcontext() if get_ident() == self._own_thread else self.device

    def note_end(self, launched: _PassOnThreads, result: RunResult) -> None:
        """Note the result of a pass. Raises MemoryError if the test wants that."""
        launched.is_collected = True
        self.num_collected += 1
        self.results.append(result)
        is_due = self.fails_at_collect is not None and self.num_collected >= self.fails_at_collect
        if is_due and self._newest is not launched and self._newest is not None:
            self._newest.is_collected = True  # which will not be done
            self.fails_at_collect = None
            raise MemoryError("the result is lost, as the test wants")
        self.busy.append(not self.device.is_idle)


class _PassOnThreads:
    """Implements `Pending`."""

    def __init__(self, runner: RunnerOnThreads, pending: Pending) -> None:
        self._runner = runner
        self._pending = pending
        self.is_collected = False

    def allows(self, plan: Plan) -> bool:
        return self._pending.allows(plan)

    def collect(self) -> RunResult:
        with self._runner.computing():
            result = self._pending.collect()
            self._runner.note_end(self, result)
            return result
