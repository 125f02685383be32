"""Parts of an engine step as spans. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from baton.telemetry import names
from baton.telemetry.tracing.otlp_json import ExportedSpan
from baton.telemetry.tracing.spans import Span, child_id

PART_NAMES = {part: part.removeprefix("baton.step.") for part in names.STEP_PARTS}


def step_parts(step_span: ExportedSpan) -> Iterator[ExportedSpan]:
    """Yield the parts of a step as child spans, in order."""
    step, at_ns = step_span.span, step_span.span.began_ns
    for part, name in PART_NAMES.items():
        duration_s = step.attributes.get(part)
        if not isinstance(duration_s, float):
            continue
        ended_ns = min(step.ended_ns, at_ns + round(duration_s * 1e9))
        own_id = child_id(step.span_id, name)
        role = {names.ROLE: step.attributes.get(names.ROLE, "")}
        span = Span(name, step.trace_id, own_id, step.span_id, at_ns, ended_ns, attributes=role)
        yield ExportedSpan(span, step_span.resource)
        at_ns = ended_ns
