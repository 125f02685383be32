"""Spans put together to traces: who hangs under whom, and what they tell of the request. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from telemetry import names
from telemetry.otlp_json import ToldSpan
from telemetry.spans import AttributeValue, Span, SpanEvent, SpanStatus
from telemetry.steps import parts_of

ROOTS = (names.GENERATE, names.ENGINE_STEP)


@dataclass(frozen=True, slots=True)
class Row:
    """A span in its place in the tree."""

    span: Span
    who: str  # router, or the node's name
    role: str
    branches: tuple[bool, ...]  # for each level below the root: whether it is the last one there

    @property
    def depth(self) -> int:
        return len(self.branches)


@dataclass(frozen=True)
class Trace:
    """All that is known of one request, or of one step of an engine."""

    trace_id: int
    told: tuple[ToldSpan, ...]

    @cached_property
    def root(self) -> Span | None:
        """A request's generate span; None while the router has not told of it, or no longer."""
        found = [one.span for one in self.told if one.span.name in ROOTS]
        return min(found, key=_began, default=None)

    @property
    def is_step(self) -> bool:
        return self.root is not None and self.root.name == names.ENGINE_STEP

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """As a tree, the earliest first; spans whose parent is not known come last."""
        told = [*self.told]
        if self.is_step:
            told += [part for one in self.told for part in parts_of(one)]
        ids = {one.span.span_id for one in told}
        children: dict[int | None, list[ToldSpan]] = defaultdict(list)
        for one in sorted(told, key=lambda one: _began(one.span)):
            parent = one.span.parent_id
            children[parent if parent in ids else None].append(one)
        tops = sorted(children[None], key=lambda one: one.span.name not in ROOTS)
        return tuple(row for top in tops for row in _below(top, children, ()))

    @property
    def began_ns(self) -> int:
        return self.root.began_ns if self.root else min(_began(one.span) for one in self.told)

    @property
    def ended_ns(self) -> int:
        return max(one.span.ended_ns for one in self.told)

    @property
    def duration_s(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9

    @property
    def time_to_first_token_s(self) -> float | None:
        value = self.attribute(names.TIME_TO_FIRST_TOKEN)
        return value if isinstance(value, float) else None

    @property
    def outcome(self) -> str:
        if self.root is None:
            return "unfinished"
        value = self.root.attributes.get(names.OUTCOME)
        return str(value) if value else "ok"

    def attribute(self, name: str) -> AttributeValue | None:
        """Of the request as a whole."""
        return None if self.root is None else self.root.attributes.get(name)


def traces_of(spans: Iterable[ToldSpan]) -> list[Trace]:
    """The oldest first."""
    by_trace: dict[int, dict[int, ToldSpan]] = defaultdict(dict)
    for one in spans:
        by_trace[one.span.trace_id][one.span.span_id] = one
    traces = [Trace(trace_id, tuple(told.values())) for trace_id, told in by_trace.items()]
    return sorted(traces, key=lambda trace: trace.began_ns)


def note_of(span: Span) -> str:
    """The few facts of a span that belong beside its bar."""
    attributes = span.attributes
    if span.status is SpanStatus.ERROR:
        return f"{attributes.get(names.ERROR_TYPE, 'failed')}: {span.status_message}"
    told = [_failure(event) for event in span.events if event.name == names.LEG_FAILED]
    told += [_FACTS[name](value) for name, value in attributes.items() if name in _FACTS and value]
    if attributes.get(names.OUTCOME) == "cancelled":
        told.insert(0, "cancelled")
    return ", ".join(told)


def failed_node_of(row: Row) -> str | None:
    """Whom the router's call did not get an answer from; that node may have told nothing itself."""
    is_call = row.role == "router" and row.span.name in (names.PREFILL, names.DECODE)
    if not is_call or row.span.status is not SpanStatus.ERROR:
        return None
    return str(row.span.attributes.get(names.NODE, ""))


def failures_of(trace: Trace) -> list[str]:
    """What went wrong in it, where, and why."""
    return [
        f"{row.span.name} on {failed_node_of(row) or row.who}: {note_of(row.span)}"
        for row in trace.rows
        if row.span.status is SpanStatus.ERROR
    ]


def _failure(event: SpanEvent) -> str:
    told = event.attributes
    node, kind, message = (told.get(n) for n in (names.NODE, names.ERROR_TYPE, names.ERROR_MESSAGE))
    return f"after {node or 'a node'} failed: {kind}: {message}"


def _below(
    one: ToldSpan, children: dict[int | None, list[ToldSpan]], branches: tuple[bool, ...]
) -> Iterator[Row]:
    role = str(one.span.attributes.get(names.ROLE) or one.resource.get(names.ROLE, ""))
    node = str(one.resource.get(names.NODE, role))
    yield Row(one.span, "router" if role == "router" else node, role, branches)
    below = children.get(one.span.span_id, [])
    for place, child in enumerate(below, start=1):
        yield from _below(child, children, (*branches, place == len(below)))


def _began(span: Span) -> int:
    return span.began_ns


def _bytes(value: AttributeValue) -> str:
    number = float(value) if isinstance(value, int | float) else 0.0
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


_FACTS: dict[str, Callable[[Any], str]] = {
    names.CHOSEN_PREFILL: lambda value: f"→ {value}",
    names.CHOSEN_DECODE: lambda value: f"→ {value}",
    names.ROUTE_REASON: str,
    names.WAIT_FOR: lambda value: f"for {value}",
    names.TOKENS: lambda value: f"{value} tokens",
    names.CACHED_TOKENS: lambda value: f"{value} cached",
    names.PREEMPTIONS: lambda value: f"{value} preemptions",
    names.TIME_PER_TOKEN: lambda value: f"{value * 1000:.1f} ms/token",
    names.STEP_ROWS: lambda value: f"{value} rows",
    names.STEP_PREFILL_TOKENS: lambda value: f"{value} tokens of prompts",
    names.STEP_DECODE_TOKENS: lambda value: f"{value} of answers",
    names.KV_BYTES: lambda value: f"{_bytes(value)} of KV",
    names.KV_RATE: lambda value: f"{value:.2g} GB/s",
    names.KV_OVERLAP: lambda value: f"{value:.0%} before prefill ended",
}


def find_trace(traces: Sequence[Trace], wanted: str) -> Trace | None:
    """By the beginning of its id, or by the request's; the newest request if nothing is wanted."""
    for trace in reversed(traces):
        if trace.is_step and not wanted:
            continue
        request_id = str(trace.attribute(names.RESPONSE_ID) or "")
        if f"{trace.trace_id:032x}".startswith(wanted.lower()) or request_id == wanted:
            return trace
    return None
