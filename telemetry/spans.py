"""A span as a value, and the context that ties spans of several processes together. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b

from telemetry.names import ERROR_TYPE, OUTCOME

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]
Metadata = tuple[tuple[str, str], ...]
ToUnixNs = Callable[[float], int]  # from the process's monotonic seconds

VERSION_0 = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a span hangs: W3C's traceparent."""

    trace_id: int
    span_id: int
    is_sampled: bool = True

    @property
    def trace_hex(self) -> str:
        return f"{self.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


def context_from(traceparent: str) -> TraceContext | None:
    """None for what is no traceparent: it is then as if none had come."""
    match = VERSION_0.fullmatch(traceparent.strip())
    if match is None:
        return None
    trace_id, span_id, flags = (int(match[group], 16) for group in (1, 2, 3))
    is_known = bool(trace_id and span_id)
    return TraceContext(trace_id, span_id, bool(flags & 1)) if is_known else None


class SpanKind(IntEnum):
    """OTLP's numbers."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class SpanStatus(IntEnum):
    """OTLP's numbers."""

    UNSET = 0
    OK = 1
    ERROR = 2


class Outcome(IntEnum):
    """How a call or a leg of it ended."""

    OK = 0
    CANCELLED = 1  # by whoever asked for it; nobody's fault
    FAILED = 2
    REFUSED = 3  # before anything was done
    DEADLINE_EXCEEDED = 4

    @property
    def status(self) -> SpanStatus:
        if self is Outcome.OK:
            return SpanStatus.OK
        return SpanStatus.UNSET if self is Outcome.CANCELLED else SpanStatus.ERROR


@dataclass(frozen=True, slots=True)
class End:
    """When and how something ended."""

    at_s: float
    outcome: Outcome = Outcome.OK
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
    """Without those that are not known."""
    return {name: value for name, value in attributes.items() if value is not None}


def child_id(parent_id: int, name: str) -> int:
    """The same each time: spans may be made from a timeline more than once."""
    digest = blake2b(f"{parent_id:016x}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1


@dataclass(frozen=True, slots=True)
class SpanMaker:
    """Makes the spans of one trace from monotonic times and ends."""

    trace_id: int
    to_unix_ns: ToUnixNs

    def span(
        self,
        name: str,
        parent_id: int | None,
        began_s: float,
        end: End,
        attributes: Mapping[str, AttributeValue | None],
        *,
        span_id: int | None = None,  # None: named after its parent
        kind: SpanKind = SpanKind.INTERNAL,
        events: tuple[SpanEvent, ...] = (),
        links: Iterable[int] = (),
    ) -> Span:
        told = known(attributes)
        if end.outcome is not Outcome.OK:
            told[OUTCOME] = end.outcome.name.lower()
        if end.error_type and end.outcome.status is SpanStatus.ERROR:
            told[ERROR_TYPE] = end.error_type
        began_ns = self.to_unix_ns(began_s)
        return Span(
            name=name,
            trace_id=self.trace_id,
            span_id=child_id(parent_id or 0, name) if span_id is None else span_id,
            parent_id=parent_id,
            began_ns=began_ns,
            ended_ns=max(began_ns, self.to_unix_ns(end.at_s)),
            kind=kind,
            attributes=told,
            events=events,
            links=tuple(SpanLink(self.trace_id, one) for one in links),
            status=end.outcome.status,
            status_message=end.message if end.outcome.status is SpanStatus.ERROR else "",
        )

    def event(self, name: str, at_s: float, **attributes: AttributeValue) -> SpanEvent:
        return SpanEvent(name, self.to_unix_ns(at_s), attributes)
