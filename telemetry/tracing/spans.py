"""Spans as values, and the trace context propagated between processes. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b

from baton.telemetry.names import ERROR_TYPE, OUTCOME, ROLE

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]
Metadata = tuple[tuple[str, str], ...]
ToUnixNs = Callable[[float], int]  # from monotonic seconds of the process

VERSION_0 = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Trace context as in W3C's traceparent."""

    trace_id: int
    span_id: int
    is_sampled: bool = True

    @property
    def trace_hex(self) -> str:
        return f"{self.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


def parse_traceparent(traceparent: str) -> TraceContext | None:
    """Parse a traceparent. Return None if it is malformed: it is then treated as absent."""
    match = VERSION_0.fullmatch(traceparent.strip())
    if match is None:
        return None
    trace_id, span_id, flags = (int(match[group], 16) for group in (1, 2, 3))
    is_valid = bool(trace_id and span_id)
    return TraceContext(trace_id, span_id, bool(flags & 1)) if is_valid else None


class SpanKind(IntEnum):
    """Span kind, with OTLP's numbers."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class SpanStatus(IntEnum):
    """Span status, with OTLP's numbers."""

    UNSET = 0
    OK = 1
    ERROR = 2


class SpanOutcome(IntEnum):
    OK = 0
    CANCELLED = 1  # by the caller; not an error
    FAILED = 2
    REFUSED = 3  # before any work was done
    DEADLINE_EXCEEDED = 4

    @property
    def status(self) -> SpanStatus:
        if self is SpanOutcome.OK:
            return SpanStatus.OK
        return SpanStatus.UNSET if self is SpanOutcome.CANCELLED else SpanStatus.ERROR


@dataclass(frozen=True, slots=True)
class End:
    """End of a call, attempt or part: time, outcome and error."""

    at_s: float
    outcome: SpanOutcome = SpanOutcome.OK
    error_type: str = ""
    message: str = ""
    rpc_status: str = ""


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    at_ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanLink:
    trace_id: int
    span_id: int


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    trace_id: int
    span_id: int
    parent_id: int | None  # None: a root
    began_ns: int  # since the Unix epoch
    ended_ns: int
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()
    status: SpanStatus = SpanStatus.UNSET
    status_message: str = ""

    @property
    def duration_s(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9


def known(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """Return the attributes that have a value."""
    return {name: value for name, value in attributes.items() if value is not None}


def child_id(parent_id: int, name: str) -> int:
    """Derive a deterministic span id: spans may be made from a timeline more than once."""
    digest = blake2b(f"{parent_id:016x}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1


@dataclass(frozen=True, slots=True)
class SpanMaker:
    """Builds a process's spans of one trace from monotonic times."""

    trace_id: int
    role: str
    to_unix_ns: ToUnixNs

    def span(
        self,
        name: str,
        parent_id: int | None,
        began_s: float,
        end: End,
        attributes: Mapping[str, AttributeValue | None],
        *,
        span_id: int | None = None,  # None: derived from the parent's id and the name
        kind: SpanKind = SpanKind.INTERNAL,
        events: tuple[SpanEvent, ...] = (),
        links: Iterable[int] = (),
    ) -> Span:
        span_attributes = {ROLE: self.role, **known(attributes)}
        if end.outcome is not SpanOutcome.OK:
            span_attributes[OUTCOME] = end.outcome.name.lower()
        if end.error_type and end.outcome.status is SpanStatus.ERROR:
            span_attributes[ERROR_TYPE] = end.error_type
        began_ns = self.to_unix_ns(began_s)
        return Span(
            name=name,
            trace_id=self.trace_id,
            span_id=child_id(parent_id or 0, name) if span_id is None else span_id,
            parent_id=parent_id,
            began_ns=began_ns,
            ended_ns=max(began_ns, self.to_unix_ns(end.at_s)),
            kind=kind,
            attributes=span_attributes,
            events=events,
            links=tuple(SpanLink(self.trace_id, linked_id) for linked_id in links),
            status=end.outcome.status,
            status_message=end.message if end.outcome.status is SpanStatus.ERROR else "",
        )

    def event(self, name: str, at_s: float, **attributes: AttributeValue) -> SpanEvent:
        return SpanEvent(name, self.to_unix_ns(at_s), attributes)
