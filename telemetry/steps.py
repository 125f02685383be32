"""Engine steps as readers see them: their parts, and who was in them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from telemetry import names
from telemetry.otlp_json import ToldSpan
from telemetry.spans import Span, child_id

PART_NAMES = {part: part.removeprefix("baton.step.") for part in names.STEP_PARTS}


def parts_of(told: ToldSpan) -> Iterator[ToldSpan]:
    """A step's parts as spans below it, in their order."""
    step, at_ns = told.span, told.span.began_ns
    for part, name in PART_NAMES.items():
        took_s = step.attributes.get(part)
        if not isinstance(took_s, float):
            continue
        ended_ns = min(step.ended_ns, at_ns + round(took_s * 1e9))
        own_id = child_id(step.span_id, name)
        role = {names.ROLE: step.attributes.get(names.ROLE, "")}
        span = Span(name, step.trace_id, own_id, step.span_id, at_ns, ended_ns, attributes=role)
        yield ToldSpan(span, told.resource)
        at_ns = ended_ns
