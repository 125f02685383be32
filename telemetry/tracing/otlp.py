"""OTLP span exporter over gRPC, based on the OpenTelemetry SDK."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from baton.telemetry.names import SCOPE
from baton.telemetry.tracing import spans as ours
from baton.telemetry.tracing.outlet import ExportFailed

TIMEOUT_S = 10
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
KINDS = {
    ours.SpanKind.INTERNAL: SpanKind.INTERNAL,
    ours.SpanKind.SERVER: SpanKind.SERVER,
    ours.SpanKind.CLIENT: SpanKind.CLIENT,
}
STATUSES = {
    ours.SpanStatus.UNSET: StatusCode.UNSET,
    ours.SpanStatus.OK: StatusCode.OK,
    ours.SpanStatus.ERROR: StatusCode.ERROR,
}


class OtlpExport:
    """OTLP exporter. OTEL_EXPORTER_OTLP_* set its headers, certificates and compression."""

    def __init__(self, endpoint: str) -> None:
        insecure = None if endpoint.startswith(("https://", "http://")) else True
        self._exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=TIMEOUT_S)

    def send(self, spans: Iterable[ReadableSpan]) -> None:
        """Raises ExportFailed."""
        if self._exporter.export(tuple(spans)) is not SpanExportResult.SUCCESS:
            raise ExportFailed("the collector did not accept the spans")

    def sender_for(self, resource: Resource) -> Any:
        def send(spans: Sequence[ours.Span]) -> None:
            self.send(readable(span, resource) for span in spans)

        return send

    def close(self) -> None:
        self._exporter.shutdown()


def resource_of(attributes: ours.Attributes) -> Resource:
    return Resource.create(dict(attributes))


def readable(span: ours.Span, resource: Resource) -> ReadableSpan:
    """Convert a span to the SDK's type of an ended span."""
    parent = None if span.parent_id is None else _context(span.trace_id, span.parent_id)
    message = span.status_message or None if span.status is ours.SpanStatus.ERROR else None
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=parent,
        resource=resource,
        attributes=dict(span.attributes),
        events=[Event(event.name, dict(event.attributes), event.at_ns) for event in span.events],
        links=[Link(_context(link.trace_id, link.span_id)) for link in span.links],
        kind=KINDS[span.kind],
        status=Status(STATUSES[span.status], message),
        start_time=span.began_ns,
        end_time=span.ended_ns,
        instrumentation_scope=InstrumentationScope(SCOPE),
    )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=SAMPLED)
