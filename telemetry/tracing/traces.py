"""Traces assembled from spans: the span tree, and summaries of requests and steps. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from baton.telemetry import names
from baton.telemetry.tracing.otlp_json import ExportedSpan
from baton.telemetry.tracing.spans import AttributeValue, Span, SpanEvent, SpanStatus, child_id

ROOTS = (names.GENERATE, names.ENGINE_STEP)
PART_NAMES = {part: part.removeprefix("baton.step.") for part in names.STEP_PARTS}
MAX_STEPS = 10


Related = tuple[int, str]  # id of a linked trace, and its description


@dataclass(frozen=True, slots=True)
class TraceRow:
    """Span of a trace and its position in the tree."""

    span: Span
    node: str  # router, or the id of the node
    role: str
    branches: tuple[bool, ...]  # per level below the root: True for the last sibling

    @property
    def depth(self) -> int:
        return len(self.branches)


@dataclass(frozen=True)
class Trace:
    """Spans of one request, or of one step of an engine."""

    trace_id: int
    exported_spans: tuple[ExportedSpan, ...]

    @cached_property
    def root(self) -> Span | None:
        """The generate or engine_step span; None if it is not stored yet, or no longer."""
        found = [exported.span for exported in self.exported_spans if exported.span.name in ROOTS]
        return min(found, key=_began, default=None)

    @property
    def is_step(self) -> bool:
        return self.root is not None and self.root.name == names.ENGINE_STEP

    @cached_property
    def rows(self) -> tuple[TraceRow, ...]:
        """The spans in tree order, siblings by start; spans with an unknown parent come last."""
        spans = [*self.exported_spans]
        if self.is_step:
            spans += [part for step in self.exported_spans for part in step_parts(step)]
        ids = {exported.span.span_id for exported in spans}
        children: dict[int | None, list[ExportedSpan]] = defaultdict(list)
        for child in sorted(spans, key=lambda exported: _began(exported.span)):
            parent = child.span.parent_id
            children[parent if parent in ids else None].append(child)
        tops = sorted(children[None], key=lambda top: top.span.name not in ROOTS)
        return tuple(row for top in tops for row in _below(top, children, ()))

    @property
    def began_ns(self) -> int:
        return (
            self.root.began_ns
            if self.root
            else min(_began(each.span) for each in self.exported_spans)
        )

    @property
    def ended_ns(self) -> int:
        return max(each.span.ended_ns for each in self.exported_spans)

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
        """Return an attribute of the root span."""
        return None if self.root is None else self.root.attributes.get(name)


def traces_of(spans: Iterable[ExportedSpan]) -> list[Trace]:
    """Group spans by trace, oldest trace first."""
    by_trace: dict[int, dict[int, ExportedSpan]] = defaultdict(dict)
    for exported in spans:
        by_trace[exported.span.trace_id][exported.span.span_id] = exported
    traces = [Trace(trace_id, tuple(by_id.values())) for trace_id, by_id in by_trace.items()]
    return sorted(traces, key=lambda trace: trace.began_ns)


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


def note_of(span: Span) -> str:
    """Return the note next to a span's bar: its error or main attributes."""
    attributes = span.attributes
    if span.status is SpanStatus.ERROR:
        return f"{attributes.get(names.ERROR_TYPE, 'failed')}: {span.status_message}"
    notes = [_failure(event) for event in span.events if event.name == names.LEG_FAILED]
    notes += fetches_of(span)
    notes += [_NOTES[name](value) for name, value in attributes.items() if name in _NOTES and value]
    if attributes.get(names.OUTCOME) == "cancelled":
        notes.insert(0, "cancelled")
    return ", ".join(notes)


def fetches_of(span: Span) -> list[str]:
    """Describe loads and pulls, such as "loaded 12 blocks from host in 489.0 ms, 21 MiB"."""
    by_source: dict[tuple[str, str, str], list[SpanEvent]] = {}
    for event in span.events:
        if event.name in _FETCHES:
            verb, of_source = _FETCHES[event.name]
            source, outcome = (event.attributes.get(n) for n in (of_source, names.KV_OUTCOME))
            by_source.setdefault((verb, str(source or ""), str(outcome)), []).append(event)
    return [_fetch(*key, events) for key, events in by_source.items()]


def failed_node_of(row: TraceRow) -> str | None:
    """Return the node of a failed call of the router. That node may have exported no spans."""
    is_call = row.role == "router" and row.span.name in _LEGS
    if not is_call or row.span.status is not SpanStatus.ERROR:
        return None
    return str(row.span.attributes.get(names.NODE, ""))


def failures_of(trace: Trace) -> list[str]:
    """Describe the failed spans of a trace: span, node and error."""
    return [
        f"{row.span.name} on {failed_node_of(row) or row.node}: {note_of(row.span)}"
        for row in trace.rows
        if row.span.status is SpanStatus.ERROR
    ]


def _failure(event: SpanEvent) -> str:
    attributes = event.attributes
    node, kind, message = (
        attributes.get(n) for n in (names.NODE, names.ERROR_TYPE, names.ERROR_MESSAGE)
    )
    return f"after {node or 'a node'} failed: {kind}: {message}"


def _fetch(verb: str, source: str, outcome: str, events: Sequence[SpanEvent]) -> str:
    num_blocks = sum(_number(event, names.KV_BLOCKS) for event in events)
    num_bytes = sum(_number(event, names.KV_BYTES) for event in events)
    ends_ms = [event.at_ns / 1e6 + _number(event, names.KV_DURATION) * 1e3 for event in events]
    took_ms = max(ends_ms) - min(event.at_ns / 1e6 for event in events)
    where = f" from {source}" if source else ""
    blocks = _plural(round(num_blocks), "block")
    what = f"{verb} {blocks}{where} in {took_ms:.1f} ms, {_bytes(num_bytes)}"
    return what if outcome == "done" else f"{what} ({outcome})"


def _number(event: SpanEvent, name: str) -> float:
    value = event.attributes.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _below(
    exported: ExportedSpan,
    children: dict[int | None, list[ExportedSpan]],
    branches: tuple[bool, ...],
) -> Iterator[TraceRow]:
    role = str(exported.span.attributes.get(names.ROLE) or exported.resource.get(names.ROLE, ""))
    node = str(exported.resource.get(names.NODE, role))
    yield TraceRow(exported.span, "router" if role == "router" else node, role, branches)
    below = children.get(exported.span.span_id, [])
    for place, child in enumerate(below, start=1):
        yield from _below(child, children, (*branches, place == len(below)))


def _began(span: Span) -> int:
    return span.began_ns


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _bytes(value: AttributeValue) -> str:
    number = float(value) if isinstance(value, int | float) else 0.0
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


_LEGS = (names.PREFETCH, names.ENCODE, names.PREFILL, names.DECODE)
# By event: what happened, and the attribute of its source.
_FETCHES = {names.KV_LOAD: ("loaded", names.KV_TIER), names.KV_PULL: ("pulled", names.KV_PEER)}
_NOTES: dict[str, Callable[[Any], str]] = {
    names.CHOSEN_PREFILL: lambda value: f"→ {value}",
    names.CHOSEN_HOLDER: lambda value: f"pulls from {value}",
    names.CHOSEN_DECODE: lambda value: f"→ {value}",
    names.ROUTE_REASON: str,
    names.IMAGES: lambda value: _plural(value, "image"),
    names.IMAGES_CACHED: lambda value: f"{value} prepared before",
    names.IMAGE_BYTES: _bytes,
    names.PICTURES: lambda value: _plural(value, "picture"),
    names.PICTURES_CACHED: lambda value: f"{value} in memory",
    names.PICTURE_ROWS: lambda value: f"{value} rows",
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
    """Return the newest trace with this trace id prefix or request id; "" matches any request."""
    for trace in reversed(traces):
        if trace.is_step and not wanted:
            continue
        request_id = str(trace.attribute(names.RESPONSE_ID) or "")
        if f"{trace.trace_id:032x}".startswith(wanted.lower()) or request_id == wanted:
            return trace
    return None


def related_to(trace: Trace, kept: Sequence[Trace]) -> tuple[str, list[Related]]:
    """Return a heading and the requests of a step, or the longest steps of a request."""
    if trace.is_step:
        return "traced requests in it", _requests_in(trace, kept)
    steps = [step for step in kept if step.is_step and trace.trace_id in _links(step)]
    steps.sort(key=lambda step: step.duration_s, reverse=True)
    found = [(step.trace_id, _step_name(step)) for step in steps[:MAX_STEPS]]
    shown = "" if len(steps) <= MAX_STEPS else f", the {MAX_STEPS} longest of {len(steps)}"
    return f"its traced steps{shown}", found


def _requests_in(step: Trace, kept: Sequence[Trace]) -> list[Related]:
    by_id = {request.trace_id: request for request in kept}
    return [
        (trace_id, _request_name(by_id.get(trace_id))) for trace_id in dict.fromkeys(_links(step))
    ]


def _request_name(request: Trace | None) -> str:
    if request is None:
        return "its trace is not stored here"
    return f"request {request.attribute(names.RESPONSE_ID) or 'unknown'}"


def _step_name(step: Trace) -> str:
    row, number = step.rows[0], step.attribute(names.STEP_NUMBER)
    return f"step {number} of {row.node}, {step.duration_s * 1000:.1f} ms"


def _links(step: Trace) -> list[int]:
    return [] if step.root is None else [link.trace_id for link in step.root.links]
