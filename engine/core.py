"""The engine's step: schedule, run, update. Knows no thread, no clock and no gRPC."""

from __future__ import annotations

from engine.plan import KvWorker, Runner, RunResult, StepResult
from engine.request import StepOutputs
from engine.scheduler import Scheduler
from kv_transfer.types import KvOrders, KvReports

NO_ORDERS = KvOrders()
NO_REPORTS = KvReports()


class EngineCore:
    """Owns scheduler, runner and KV worker, and turns them over once per step."""

    def __init__(self, scheduler: Scheduler, runner: Runner, kv_worker: KvWorker) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._kv_worker = kv_worker
        self._made_progress = False

    def step(self, now: float) -> StepOutputs:
        """One turn: at most one forward pass, never a wait on the wire."""
        plan = self.scheduler.schedule(now)
        self._kv_worker.start(plan.kv_orders, now)
        run = self._runner.run(plan) if plan.concerns_runner else RunResult()
        reports = self._kv_worker.poll(now)
        self._made_progress = not plan.is_empty or reports != NO_REPORTS
        return self.scheduler.update(plan, StepResult(run, reports))

    def may_sleep_s(self, now: float) -> float | None:
        """How long no step is needed unless somebody asks for something; None: for ever.

        A step that moved nothing will move nothing again until mail comes or the wire does.
        """
        return 0.0 if self._made_progress else self._kv_worker.next_poll_s(now)


class NoKvWorker:
    """The KV worker of an engine that hands nothing over."""

    def start(self, orders: KvOrders, now: float) -> None:
        if orders != NO_ORDERS:
            raise RuntimeError(f"this engine has no KV transport, and was ordered {orders}")

    def poll(self, now: float) -> KvReports:
        return NO_REPORTS

    def next_poll_s(self, now: float) -> float | None:
        return None
