"""Sample spans for exporters and stores."""

from __future__ import annotations

from baton.telemetry.tracing.spans import (
    Attributes,
    Span,
    SpanEvent,
    SpanKind,
    SpanLink,
    SpanStatus,
    ToUnixNs,
)

RESOURCE: Attributes = {"service.name": "baton-router", "process.pid": 7}


def a_span(number: int = 1, *, parent_id: int | None = None, name: str = "generate") -> Span:
    return Span(
        name=name,
        trace_id=0xABC,
        span_id=number,
        parent_id=parent_id,
        began_ns=1_000_000_000,
        ended_ns=1_500_000_000,
        kind=SpanKind.SERVER,
        attributes={"a": "b", "n": 2**40, "x": 0.5, "yes": True, "many": ("one", "two")},
        events=(SpanEvent("chunk", 1_200_000_000, {"baton.tokens": 5}),),
        links=(SpanLink(0xABC, 99),),
        status=SpanStatus.ERROR,
        status_message="it broke",
    )


class OneSpanTimeline:
    """Timeline that consists of one span."""

    def __init__(self, span: Span) -> None:
        self.span = span

    def spans(self, to_unix_ns: ToUnixNs) -> list[Span]:
        return [self.span]
