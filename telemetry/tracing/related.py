"""Links between traces: the requests of a step, the steps of a request. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.telemetry import names
from baton.telemetry.tracing.traces import Trace

MAX_STEPS = 10


Related = tuple[int, str]  # id of a linked trace, and its description


def related_to(trace: Trace, kept: Sequence[Trace]) -> tuple[str, list[Related]]:
    """Return a heading and the requests of a step, or the longest steps of a request."""
    if trace.is_step:
        return "traced requests in it", _requests_in(trace, kept)
    steps = [step for step in kept if step.is_step and trace.trace_id in _links(step)]
    steps.sort(key=lambda step: step.duration_s, reverse=True)
    found = [(step.trace_id, _step_name(step)) for step in steps[:MAX_STEPS]]
    shown = "" if len(steps) <= MAX_STEPS else f", the {MAX_STEPS} longest of {len(steps)}"
    return f"its traced steps{shown}", found


def _requests_in(step: Trace, kept: Sequence[Trace]) -> list[Related]:
    by_id = {request.trace_id: request for request in kept}
    return [
        (trace_id, _request_name(by_id.get(trace_id))) for trace_id in dict.fromkeys(_links(step))
    ]


def _request_name(request: Trace | None) -> str:
    if request is None:
        return "its trace is not stored here"
    return f"request {request.attribute(names.RESPONSE_ID) or 'unknown'}"


def _step_name(step: Trace) -> str:
    row, number = step.rows[0], step.attribute(names.STEP_NUMBER)
    return f"step {number} of {row.node}, {step.duration_s * 1000:.1f} ms"


def _links(step: Trace) -> list[int]:
    return [] if step.root is None else [link.trace_id for link in step.root.links]
