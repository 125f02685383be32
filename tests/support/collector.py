"""OTLP collector over gRPC that stores the spans it receives."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Collected:
    """Span as received by the collector."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty: a root
    began_ns: int
    ended_ns: int
    kind: int
    status: int
    attributes: Mapping[str, Any]
    events: tuple[str, ...]
    links: tuple[str, ...]  # span ids
    linked_traces: tuple[str, ...]
    resource: Mapping[str, Any] = field(default_factory=dict)

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.address = ""
        self._spans: dict[str, list[Collected]] = defaultdict(list)
        self._changed = threading.Condition()

    def Export(  # noqa: N802 - gRPC's name
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._changed:
            for batch in request.resource_spans:
                resource = _attributes(batch.resource.attributes)
                for scope in batch.scope_spans:
                    for message in scope.spans:
                        self._spans[message.trace_id.hex()].append(_span(message, resource))
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str, is_whole: Callable[[list[Collected]], bool]) -> list[Collected]:
        """Wait until the trace satisfies `is_whole`, and return its spans."""
        with self._changed:
            spans = self._spans[trace_id]
            is_there = self._changed.wait_for(lambda: is_whole(spans), LONGEST_WAIT_S)
            assert is_there, f"of trace {trace_id} only {[span.name for span in spans]} came"
            return list(spans)

    def named(self, name: str) -> list[Collected]:
        """Return all received spans of this name."""
        with self._changed:
            return [span for spans in self._spans.values() for span in spans if span.name == name]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _span(message: SpanMessage, resource: Mapping[str, Any]) -> Collected:
    return Collected(
        name=message.name,
        trace_id=message.trace_id.hex(),
        span_id=message.span_id.hex(),
        parent_id=message.parent_span_id.hex(),
        began_ns=message.start_time_unix_nano,
        ended_ns=message.end_time_unix_nano,
        kind=message.kind,
        status=message.status.code,
        attributes=_attributes(message.attributes),
        events=tuple(event.name for event in message.events),
        links=tuple(link.span_id.hex() for link in message.links),
        linked_traces=tuple(link.trace_id.hex() for link in message.links),
        resource=resource,
    )


def _attributes(reported: Any) -> dict[str, Any]:
    return {one.key: _value(one) for one in reported}


def _value(one: KeyValue) -> Any:
    kind = one.value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(KeyValue(value=value)) for value in one.value.array_value.values)
    return None if kind is None else getattr(one.value, kind)
