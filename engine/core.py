"""One engine step: schedule, run, update. Independent of threads and gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from baton.core.output import Output
from baton.engine.containment import Containment
from baton.engine.errors import EngineStopped, PassHookFailed
from baton.engine.pass_thread import LaunchedPass, PassThread
from baton.engine.plan import Plan, Runner, RunResult, StepObserver, StepRecord
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.types import NO_KV_ORDERS, NO_REPORTS, KvOrders

PROGRESS_INTERVAL_S = 0.001  # at which KV transfers are driven while a pass is computed


class EngineCore:
    """Owns the scheduler, the runner and the drivers of KV, and runs them one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        drivers: Sequence[KvDriver] = (),  # of KV that comes from, or goes to, elsewhere
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.scheduler = scheduler
        self._passes = PassThread(runner) if scheduler.config.async_scheduling else None
        self._ahead: tuple[Plan, LaunchedPass] | None = None
        self._runner = runner
        self._containment = Containment(self._run_pass, scheduler)
        self._drivers = tuple(drivers)
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
        if self._ahead is None:
            plan, launched = self.scheduler.schedule(began_s), None
            scheduled_s = self._start_orders(plan.kv_orders)
        else:
            (plan, launched), self._ahead, scheduled_s = self._ahead, None, began_s
        ordered_s = self._clock()
        for observer in self._observers:
            observer.note_plan(plan, ordered_s)
        run = self._run(plan, launched)
        now = self._clock()  # the pass may have taken seconds
        reports = NO_REPORTS
        for driver in self._drivers:
            reports = reports.joined(driver.poll(now))
        polled_s = self._clock()
        has_reports = reports != NO_REPORTS
        self._made_progress = not plan.is_empty or has_reports or self.scheduler.is_cut_short
        outputs = self.scheduler.update(plan, run, reports, now)
        if self._observers:
            times_s = (began_s, scheduled_s, ordered_s, now, polled_s, self._clock())
            records = tuple(each for driver in self._drivers for each in driver.take_records())
            step = StepRecord(plan, times_s, reports, records)
            for observer in self._observers:
                observer.note_end(step)
        return outputs

    def _start_orders(self, orders: KvOrders) -> float:
        """Start KV orders. Returns the time before."""
        now = self._clock()
        if orders != NO_KV_ORDERS and not self._drivers:
            raise RuntimeError(f"this engine has no KV transport, but received {orders}")
        for driver in self._drivers:
            driver.start(orders, now)
        return now

    def _run(self, plan: Plan, launched: LaunchedPass | None) -> RunResult:
        if not plan.concerns_runner:
            return RunResult()
        if self._passes is None:
            return self._containment.run(plan)
        launched = launched or self._passes.launch(plan)
        self._plan_ahead(self._passes, plan, launched)
        return self._containment.run(plan, partial(self._collect, plan, launched))

    def _plan_ahead(self, passes: PassThread, pending: Plan, launched: LaunchedPass) -> None:
        """Plan the next step and launch it, unless it depends on the result of the pass."""
        plan = None
        if not self._containment.must_end_first(pending):
            plan = self.scheduler.schedule_ahead(self._clock())
        if plan is None:
            self._start_orders(self.scheduler.take_kv_orders())
        else:
            self._start_orders(plan.kv_orders)
            self._ahead = plan, passes.launch(plan, launched)

    def _collect(self, plan: Plan, launched: LaunchedPass) -> RunResult:
        began_s = self._clock()
        try:
            while not launched.wait(PROGRESS_INTERVAL_S):
                for driver in self._drivers:
                    driver.progress(self._clock())
        except Exception as root:
            raise PassHookFailed(root) from root
        result = launched.collect()
        self._note_pass(plan, result, began_s)
        return result

    def _run_pass(self, plan: Plan) -> RunResult:
        if self._passes is not None:
            return self._collect(plan, self._passes.launch(plan))
        began_s = self._clock()
        result = self._runner.launch(plan).collect()
        self._note_pass(plan, result, began_s)
        return result

    def _note_pass(self, plan: Plan, result: RunResult, began_s: float) -> None:
        ended_s = self._clock()
        for observer in self._observers:
            if result.encode_s:
                observer.note_encoded(plan, result.encode_s, began_s)
            observer.note_pass(plan, began_s, ended_s)

    def post_from_pass(self, call: Callable[[], None]) -> None:
        """Make a call of a pass on the engine thread.

        If passes have a thread of their own, the engine thread makes it while it waits for them.
        """
        if self._passes is None:
            call()
        else:
            self._passes.post(call)

    def call_after_passes(self, call: Callable[[], None]) -> None:
        """Make a call after the passes that are launched, and before those launched later."""
        if self._passes is None:
            call()
        else:
            self._passes.call_after(call)

    def close(self) -> None:
        """Wait for the passes that are launched. No step may follow."""
        if self._passes is not None:
            self._passes.close()

    def max_idle_s(self) -> float | None:
        """Return the time for which no step is needed unless an action is posted; None: no limit.

        After a step without progress, the next one makes none either until an action is posted or
        a driver has something to report.
        """
        if self._made_progress or self._ahead is not None:
            return 0.0
        now = self._clock()
        waits = [driver.next_poll_s(now) for driver in self._drivers]
        return min((wait for wait in waits if wait is not None), default=None)
