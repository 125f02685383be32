"""Spans as OTLP/JSON and back, one line for each batch of a process. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from telemetry.names import SCOPE
from telemetry.spans import (
    Attributes,
    AttributeValue,
    Span,
    SpanEvent,
    SpanKind,
    SpanLink,
    SpanStatus,
)


class NotSpans(ValueError):
    """A line that is no OTLP/JSON of spans, as one that was cut off."""


@dataclass(frozen=True, slots=True)
class ToldSpan:
    """A span, and who told of it."""

    span: Span
    resource: Attributes


def line_of(spans: Sequence[Span], resource: Attributes) -> str:
    scope = {"scope": {"name": SCOPE}, "spans": [_span_to(span) for span in spans]}
    batch = {"resource": {"attributes": _attributes_to(resource)}, "scopeSpans": [scope]}
    return json.dumps({"resourceSpans": [batch]}, separators=(",", ":")) + "\n"


def spans_of(line: str) -> list[ToldSpan]:
    """Raises NotSpans."""
    try:
        return [
            ToldSpan(_span_from(span), _attributes_from(batch["resource"]["attributes"]))
            for batch in json.loads(line)["resourceSpans"]
            for scope in batch["scopeSpans"]
            for span in scope["spans"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise NotSpans(f"no OTLP/JSON of spans: {error!r}") from error


def _span_to(span: Span) -> dict[str, Any]:
    told: dict[str, Any] = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.began_ns),
        "endTimeUnixNano": str(span.ended_ns),
        "attributes": _attributes_to(span.attributes),
        "status": {"code": int(span.status), "message": span.status_message},
    }
    if span.parent_id is not None:
        told["parentSpanId"] = f"{span.parent_id:016x}"
    if span.events:
        told["events"] = [_event_to(event) for event in span.events]
    if span.links:
        told["links"] = [_link_to(link) for link in span.links]
    return told


def _span_from(told: dict[str, Any]) -> Span:
    status, parent = told.get("status", {}), told.get("parentSpanId")
    return Span(
        name=told["name"],
        trace_id=int(told["traceId"], 16),
        span_id=int(told["spanId"], 16),
        parent_id=int(parent, 16) if parent else None,
        began_ns=int(told["startTimeUnixNano"]),
        ended_ns=int(told["endTimeUnixNano"]),
        kind=SpanKind(told.get("kind", SpanKind.INTERNAL)),
        attributes=_attributes_from(told.get("attributes", ())),
        events=tuple(_event_from(event) for event in told.get("events", ())),
        links=tuple(_link_from(link) for link in told.get("links", ())),
        status=SpanStatus(status.get("code", SpanStatus.UNSET)),
        status_message=status.get("message", ""),
    )


def _event_to(event: SpanEvent) -> dict[str, Any]:
    return {
        "name": event.name,
        "timeUnixNano": str(event.at_ns),
        "attributes": _attributes_to(event.attributes),
    }


def _event_from(told: dict[str, Any]) -> SpanEvent:
    attributes = _attributes_from(told.get("attributes", ()))
    return SpanEvent(told["name"], int(told["timeUnixNano"]), attributes)


def _link_to(link: SpanLink) -> dict[str, str]:
    return {"traceId": f"{link.trace_id:032x}", "spanId": f"{link.span_id:016x}"}


def _link_from(told: dict[str, str]) -> SpanLink:
    return SpanLink(int(told["traceId"], 16), int(told["spanId"], 16))


def _attributes_to(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value_to(value)} for key, value in attributes.items()]


def _attributes_from(told: Sequence[dict[str, Any]]) -> dict[str, AttributeValue]:
    return {one["key"]: _value_from(one["value"]) for one in told}


def _value_to(value: AttributeValue) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case tuple():
            return {"arrayValue": {"values": [_value_to(one) for one in value]}}


def _value_from(told: dict[str, Any]) -> AttributeValue:
    [(kind, value)] = told.items()
    match kind:
        case "boolValue":
            return bool(value)
        case "intValue":
            return int(value)
        case "doubleValue":
            return float(value)
        case "stringValue":
            return str(value)
        case "arrayValue":
            return tuple(str(_value_from(one)) for one in value.get("values", ()))
    raise NotSpans(f"no attribute is of kind {kind}")
