"""The engine's step: schedule, run, update. Knows no thread and no gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.containment import Containment
from engine.errors import EngineStopped
from engine.kv_seam import KvWorker
from engine.plan import Runner, RunResult, StepResult
from engine.request import StepOutputs
from engine.scheduler import Scheduler
from kv_transfer.types import KvOrders, KvReports

NO_REPORTS = KvReports()


class EngineCore:
    """Owns scheduler, runner and KV worker, and turns them over once per step."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        kv_worker: KvWorker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self._containment = Containment(runner, scheduler)
        self._kv_worker = kv_worker
        self._clock = clock
        self._made_progress = False
        self.failure: BaseException | None = None  # what ended the engine: no step can follow

    def step(self) -> StepOutputs:
        """One turn: one forward pass, never a wait on the wire.

        A pass that fails is run again in parts. Raises what the engine ends with, and
        EngineStopped, which names it, from then on.
        """
        self.raise_if_stopped()
        try:
            return self._step()
        except BaseException as failure:
            self.failure = failure
            raise

    def raise_if_stopped(self) -> None:
        """Raises EngineStopped, which names what ended the engine."""
        if self.failure is not None:
            raise EngineStopped(f"the engine stopped: {self.failure!r}") from self.failure

    def _step(self) -> StepOutputs:
        plan = self.scheduler.schedule(self._clock())
        self._kv_worker.start(plan.kv_orders, self._clock())
        run = self._containment.run(plan) if plan.concerns_runner else RunResult()
        now = self._clock()  # the pass may have taken seconds
        reports = self._kv_worker.poll(now)
        self._made_progress = not plan.is_empty or reports != NO_REPORTS
        return self.scheduler.update(plan, StepResult(run, reports), now)

    def may_sleep_s(self) -> float | None:
        """How long no step is needed unless somebody asks for something; None: for ever.

        A step that moved nothing will move nothing again until mail comes or the wire does.
        """
        return 0.0 if self._made_progress else self._kv_worker.next_poll_s(self._clock())


class NoKvWorker:
    """The KV worker of an engine that hands nothing over."""

    def start(self, orders: KvOrders, now: float) -> None:
        if orders != KvOrders():
            raise RuntimeError(f"this engine has no KV transport, and was ordered {orders}")

    def poll(self, now: float) -> KvReports:
        return NO_REPORTS

    def next_poll_s(self, now: float) -> float | None:
        return None
