"""One engine step: schedule, run, update. Independent of threads and gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.core.output import Output
from baton.engine.containment import Containment
from baton.engine.errors import EngineStopped
from baton.engine.plan import KvWorker, Plan, Runner, RunResult
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.step_observer import StepObserver, StepRecord
from baton.kv_transfer.external_kv import ExternalKv
from baton.kv_transfer.records import TransferRecord
from baton.kv_transfer.types import NO_KV_ORDERS, NO_REPORTS, KvOrders, KvReports


class EngineCore:
    """Owns the scheduler, the runner and the KV worker, and drives them one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        kv_worker: KvWorker,
        external: ExternalKv | None = None,  # None: no KV cache outside the engine
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._containment = Containment(self._run_pass, scheduler)
        self._kv_worker = kv_worker
        self._external = external
        self._clock = clock
        self._observers = observers
        self._made_progress = False
        self.failure: BaseException | None = None  # the exception that ended the engine

    def step(self) -> list[Output]:
        """Run one step: one forward pass, without ever waiting for the network.

        A pass that fails is run again in parts. An exception that escapes ends the engine; every
        later call raises EngineStopped, which names that exception.
        """
        self.raise_if_stopped()
        try:
            return self._step()
        except BaseException as failure:
            self.failure = failure
            raise

    def raise_if_stopped(self) -> None:
        """Raise EngineStopped, which names the cause, if the engine has ended."""
        if self.failure is not None:
            raise EngineStopped(f"the engine stopped: {self.failure!r}") from self.failure

    def _step(self) -> list[Output]:
        began_s = self._clock()
        plan = self.scheduler.schedule(began_s)
        scheduled_s = self._clock()
        self._kv_worker.start(plan.kv_orders, scheduled_s)
        if self._external is not None:
            self._external.start(plan.kv_orders.external)
        ordered_s = self._clock()
        for observer in self._observers:
            observer.note_plan(plan, ordered_s)
        run = self._containment.run(plan) if plan.concerns_runner else RunResult()
        now = self._clock()  # the pass may have taken seconds
        reports = self._kv_worker.poll(now)
        if self._external is not None:
            reports = replace(reports, external=self._external.poll())
        polled_s = self._clock()
        has_reports = reports != NO_REPORTS
        self._made_progress = not plan.is_empty or has_reports or self.scheduler.is_cut_short
        outputs = self.scheduler.update(plan, run, reports, now)
        if self._observers:
            times_s = (began_s, scheduled_s, ordered_s, now, polled_s, self._clock())
            records = self._kv_worker.take_records()
            step = StepRecord(plan, times_s, reports, records)
            for observer in self._observers:
                observer.note_end(step)
        return outputs

    def _run_pass(self, plan: Plan) -> RunResult:
        began_s = self._clock()
        result = self._runner.launch(plan).collect()
        ended_s = self._clock()
        for observer in self._observers:
            observer.note_pass(plan, began_s, ended_s)
        return result

    def max_idle_s(self) -> float | None:
        """Return the time for which no step is needed unless an action is posted; None: no limit.

        After a step without progress, the next one makes none either until an action is posted or
        the KV worker has something to report.
        """
        if self._made_progress:
            return 0.0
        return self._kv_worker.next_poll_s(self._clock())


class NoKvWorker:
    """KV worker of an engine without KV transfer."""

    def start(self, orders: KvOrders, now: float) -> None:
        if orders != NO_KV_ORDERS:
            raise RuntimeError(f"this engine has no KV transport, but received {orders}")

    def poll(self, now: float) -> KvReports:
        return NO_REPORTS

    def next_poll_s(self, now: float) -> float | None:
        return None

    def take_records(self) -> tuple[TransferRecord, ...]:
        return ()
