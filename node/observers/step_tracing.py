"""Traces of engine steps. A sample of the steps records its work and the times of its phases.

Timelines are recorded on the engine's thread; spans are created on another one (ADR 0011).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from baton.core.ids import RequestId
from baton.engine.plan import Plan
from baton.engine.step_observer import StepObserver, StepRecord
from baton.telemetry.tracing.node_timeline import NodeFacts
from baton.telemetry.tracing.spans import TraceContext
from baton.telemetry.tracing.step_timeline import StepTimeline
from baton.telemetry.tracing.tracer import Tracer, new_span_id, new_trace_id

MAX_LINKS = 128  # default limit of links per span in OpenTelemetry's SDKs

# Returns the parent context of a request's spans on this node; None if it is not traced.
ContextOf = Callable[[RequestId], TraceContext | None]


class StepTracing(StepObserver):
    def __init__(
        self, tracer: Tracer, facts: NodeFacts, ratio: float, context_of: ContextOf
    ) -> None:
        self._tracer = tracer
        self._facts = facts
        self._ratio = ratio
        self._context_of = context_of
        self._number = 0
        self._requests: list[TraceContext] | None = None  # of the current step, if it is traced

    def note_plan(self, plan: Plan, now_s: float) -> None:
        self._number += plan.concerns_runner
        self._requests = None
        if plan.num_scheduled_tokens and random.random() < self._ratio:
            # Contexts are read before the pass: a request that ends during it loses its context.
            found = [self._context_of(request_id) for request_id in plan.num_scheduled_tokens]
            self._requests = [context for context in found if context is not None]

    def note_end(self, step: StepRecord) -> None:
        if self._requests is not None:
            self._tracer.take(self._timeline(step, self._requests))

    def _timeline(self, step: StepRecord, requests: list[TraceContext]) -> StepTimeline:
        plan = step.plan
        return StepTimeline(
            context=TraceContext(new_trace_id(), new_span_id()),
            facts=self._facts,
            times_s=step.times_s,
            number=self._number,
            num_rows=len(plan.num_scheduled_tokens),
            num_prefill_tokens=plan.num_prompt_tokens,
            num_decode_tokens=sum(plan.num_scheduled_tokens.values()) - plan.num_prompt_tokens,
            requests=tuple(requests[:MAX_LINKS]),
            num_links_left_out=max(0, len(requests) - MAX_LINKS),
        )
