"""Traces of engine steps. A sample of the steps records its work and the times of its phases.

The decorators wrap an engine only when steps are traced. They run on the engine's thread only;
spans are created on another thread (ADR 0011).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from engine.core import EngineCore
from engine.kv_connector import KvWorker
from engine.plan import Plan, Runner, RunResult
from engine.request import OutputsByClient, RequestId
from engine.scheduler.scheduler import Scheduler
from kv_transfer.types import KvOrders, KvReports
from node.counting_runner import PromptTokens
from telemetry.tracing.node_timeline import NodeFacts
from telemetry.tracing.spans import TraceContext
from telemetry.tracing.step_timeline import StepTimeline
from telemetry.tracing.tracer import Tracer, new_span_id, new_trace_id

MAX_LINKS = 128  # default limit of links per span in OpenTelemetry's SDKs

# Returns the parent context of a request's spans on this node; None if it is not traced.
ContextOf = Callable[[RequestId], TraceContext | None]


class StepTracing:
    def __init__(
        self, tracer: Tracer, facts: NodeFacts, ratio: float, context_of: ContextOf
    ) -> None:
        self._tracer = tracer
        self._facts = facts
        self._ratio = ratio
        self._context_of = context_of
        self._prompts = PromptTokens()
        self._number = 0
        self.step: StepTimeline | None = None  # the current step, if it is traced

    def core(self, scheduler: Scheduler, runner: Runner, kv_worker: KvWorker) -> EngineCore:
        around = _TimedRunner(runner, self), _TimedKvWorker(kv_worker, self)
        return _TracedCore(scheduler, *around, tracing=self)

    def began(self) -> None:
        if random.random() < self._ratio:
            context = TraceContext(new_trace_id(), new_span_id())
            self.step = StepTimeline(context, self._facts, time.monotonic())

    def runs(self, plan: Plan) -> None:
        if plan.is_retry:
            return  # recorded at the failed pass
        self._number += 1
        num_prompt_tokens = self._prompts.computed_by(plan)
        step = self.step
        if step is None:
            return
        step.number = self._number
        step.num_rows = len(plan.num_scheduled_tokens)
        step.num_prefill_tokens = num_prompt_tokens
        step.num_decode_tokens = sum(plan.num_scheduled_tokens.values()) - num_prompt_tokens
        # Contexts are read before the pass: a request that ends during it loses its context.
        found = [self._context_of(request_id) for request_id in plan.num_scheduled_tokens]
        requests = [context for context in found if context is not None]
        step.requests = tuple(requests[:MAX_LINKS])
        step.num_links_left_out = len(requests) - len(step.requests)

    def ended(self) -> None:
        step, self.step = self.step, None
        if step is not None and step.num_rows:
            step.ended_s = time.monotonic()
            self._tracer.take(step)


class _TracedCore(EngineCore):
    def __init__(
        self, scheduler: Scheduler, runner: Runner, kv_worker: KvWorker, *, tracing: StepTracing
    ) -> None:
        super().__init__(scheduler, runner, kv_worker)
        self._tracing = tracing

    def step(self) -> OutputsByClient:
        self._tracing.began()
        outputs = super().step()
        self._tracing.ended()
        return outputs


class _TimedRunner:
    def __init__(self, runner: Runner, tracing: StepTracing) -> None:
        self._runner = runner
        self._tracing = tracing

    def run(self, plan: Plan) -> RunResult:
        self._tracing.runs(plan)
        result = self._runner.run(plan)
        if self._tracing.step is not None:
            self._tracing.step.ran_s = time.monotonic()
        return result


class _TimedKvWorker:
    def __init__(self, worker: KvWorker, tracing: StepTracing) -> None:
        self._worker = worker
        self._tracing = tracing

    def start(self, orders: KvOrders, now: float) -> None:
        step = self._tracing.step
        if step is not None:
            step.scheduled_s = time.monotonic()
        self._worker.start(orders, now)
        if step is not None:
            step.ordered_s = time.monotonic()

    def poll(self, now: float) -> KvReports:
        reports = self._worker.poll(now)
        if self._tracing.step is not None:
            self._tracing.step.polled_s = time.monotonic()
        return reports

    def next_poll_s(self, now: float) -> float | None:
        return self._worker.next_poll_s(now)
