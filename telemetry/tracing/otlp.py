"""OTLP span exporter over gRPC, based on the OpenTelemetry SDK."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from baton.core.errors import NamedError
from baton.telemetry.logs import exporter_log
from baton.telemetry.names import SCOPE
from baton.telemetry.tracing import spans as ours
from baton.telemetry.tracing.otlp_json import ExportedSpan
from baton.telemetry.tracing.outlet import ExportFailed

LOG = exporter_log()
TIMEOUT_S = 10
MAX_BATCH = 512
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


ResourceKey = tuple[tuple[str, ours.AttributeValue], ...]


class CollectorUnreachable(NamedError):
    """The collector did not accept the spans."""


class OtlpExport:
    """OTLP exporter. OTEL_EXPORTER_OTLP_* set its headers, certificates and compression."""

    def __init__(self, endpoint: str) -> None:
        insecure = None if endpoint.startswith(("https://", "http://")) else True
        self._exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=TIMEOUT_S)

    def send(self, spans: Iterable[ours.Span], resource: Resource) -> None:
        """Raises ExportFailed."""
        batch = tuple(_readable(span, resource) for span in spans)
        if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
            raise ExportFailed(f"the collector did not accept the spans: {LOG.reason}")

    def close(self) -> None:
        self._exporter.shutdown()


def send_all(endpoint: str, spans: Sequence[ExportedSpan]) -> int:
    """Send stored spans and return their number. Raises CollectorUnreachable."""
    by_resource: dict[ResourceKey, list[ours.Span]] = defaultdict(list)
    for exported in spans:
        by_resource[tuple(sorted(exported.resource.items()))].append(exported.span)
    with closing(OtlpExport(endpoint)) as otlp:
        for key, group in by_resource.items():
            resource = Resource.create(dict(key))
            for first in range(0, len(group), MAX_BATCH):
                try:
                    otlp.send(group[first : first + MAX_BATCH], resource)
                except ExportFailed as error:
                    raise CollectorUnreachable(f"{endpoint}: {error}") from error
    return len(spans)


def _readable(span: ours.Span, resource: Resource) -> ReadableSpan:
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
        kind=SpanKind[span.kind.name],
        status=Status(StatusCode[span.status.name], message),
        start_time=span.began_ns,
        end_time=span.ended_ns,
        instrumentation_scope=InstrumentationScope(SCOPE),
    )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=SAMPLED)
