"""Steps and the requests that were in them, found in each other's traces. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from telemetry import names
from telemetry.traces import Trace

MOST_STEPS = 10


@dataclass(frozen=True, slots=True)
class Related:
    """What another trace is of."""

    trace_id: int
    what: str


def related_to(trace: Trace, kept: Sequence[Trace]) -> tuple[str, list[Related]]:
    """Under which heading: a step's requests, or of a request's steps the longest."""
    if trace.is_step:
        return "traced requests in it", _requests_in(trace, kept)
    steps = [one for one in kept if one.is_step and trace.trace_id in _links(one)]
    steps.sort(key=lambda step: step.duration_s, reverse=True)
    found = [Related(step.trace_id, _told_of(step)) for step in steps[:MOST_STEPS]]
    shown = "" if len(steps) <= MOST_STEPS else f", the {MOST_STEPS} longest of {len(steps)}"
    return f"its traced steps{shown}", found


def _requests_in(step: Trace, kept: Sequence[Trace]) -> list[Related]:
    by_id = {one.trace_id: one for one in kept}
    return [
        Related(trace_id, _whose(by_id.get(trace_id))) for trace_id in dict.fromkeys(_links(step))
    ]


def _whose(request: Trace | None) -> str:
    if request is None:
        return "its trace is not kept here"
    return f"request {request.attribute(names.RESPONSE_ID) or 'unknown'}"


def _told_of(step: Trace) -> str:
    row, number = step.rows[0], step.attribute(names.STEP_NUMBER)
    return f"step {number} of {row.who}, {step.duration_s * 1000:.1f} ms"


def _links(step: Trace) -> list[int]:
    return [] if step.root is None else [link.trace_id for link in step.root.links]
