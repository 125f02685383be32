"""Self-contained HTML page of a trace: node lanes, waterfall, attributes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from baton.telemetry import names
from baton.telemetry.tracing.spans import AttributeValue, SpanEvent, SpanStatus
from baton.telemetry.tracing.traces import (
    PART_NAMES,
    Trace,
    TraceRow,
    failed_node_of,
    failures_of,
    note_of,
    related_to,
)
from baton.traces.terminal import FAILED, headline

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
TICKS = 5
# Length of the enlarged first part of a request, in units of its time to first token.
FIRST_PART_TTFTS = 1.25
LETTER_WIDTH = 0.62  # approximate width of a letter in percent of the page
LANE_SPANS = (
    names.ADMIT, names.ROUTE, names.PREFETCH_WAIT, names.ENCODE_WAIT, names.ENCODE_COMPUTE,
    names.PREFILL_WAIT, names.PREFILL_COMPUTE, names.KV_PUSH,
    names.DECODE_WAIT, names.KV_WAIT, names.DECODE_COMPUTE,
    *PART_NAMES.values(),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Window:
    """Time range of the trace that is drawn over the full width."""

    began_ns: int
    ended_ns: int

    def percent(self, at_ns: int) -> float:
        share = (at_ns - self.began_ns) / max(1, self.ended_ns - self.began_ns)
        return min(100.0, max(0.0, 100 * share))

    def overlaps(self, row: TraceRow) -> bool:
        return row.span.began_ns < self.ended_ns and row.span.ended_ns >= self.began_ns


def render_page(trace: Trace, kept: Sequence[Trace] = ()) -> str:
    """Render the page. `kept` are all stored traces, searched for related ones."""
    title = f"trace {trace.trace_id:032x}"
    whole = Window(trace.began_ns, trace.ended_ns)
    parts = [
        f"<h1>{title}</h1><p class=head>{escape(headline(trace))}</p>",
        *(f"<p class=failure>{FAILED} {escape(text)}</p>" for text in failures_of(trace)),
        *_first_part(trace, whole),
        f"<h2>{'The step, by its parts' if trace.is_step else 'The whole request, by node'}</h2>",
        _lanes(trace, whole),
        "<h2>Every span</h2><p class=hint>Open a row for its details.</p>",
        _waterfall(trace, whole),
        *_render_related(trace, kept),
    ]
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _first_part(trace: Trace, whole: Window) -> Iterator[str]:
    """Draw the time until the KV has arrived and the first token is sent, enlarged."""
    ttft_s = trace.time_to_first_token_s
    if ttft_s is None:
        return
    moved = [row.span.ended_ns for row in trace.rows if row.span.name == names.KV_WAIT]
    ends_ns = max([trace.began_ns + round(ttft_s * 1e9), *moved[:1]]) - trace.began_ns
    window = Window(trace.began_ns, trace.began_ns + round(ends_ns * FIRST_PART_TTFTS))
    if window.ended_ns < whole.began_ns + 0.8 * (whole.ended_ns - whole.began_ns):
        yield "<h2>The beginning, enlarged: until the KV is transferred</h2>"
        yield _lanes(trace, window)


def _lanes(trace: Trace, window: Window) -> str:
    """Draw one lane per node on a common time axis.

    A node that failed has exported no spans: its lane shows the router's call instead.
    """
    lanes: dict[tuple[str, str], list[TraceRow]] = {}
    for row in trace.rows:
        failed_node = failed_node_of(row)
        if failed_node is not None and window.overlaps(row):
            lanes.setdefault((row.span.name, failed_node), []).append(row)
        elif row.span.name in LANE_SPANS and window.overlaps(row):
            lanes.setdefault((row.role, row.node), []).append(row)
    drawn = "".join(_lane(role, node, rows, window) for (role, node), rows in lanes.items())
    return f"<div class=lanes>{_axis(window)}{drawn}{_first_token(trace, window)}</div>"


def _lane(role: str, node: str, rows: list[TraceRow], window: Window) -> str:
    levels = _levels(rows)
    num_levels = max(levels) + 1
    bars = "".join(_box(row, window, level) for row, level in zip(rows, levels, strict=True))
    style = f"height:calc({num_levels}*var(--line))"
    return (
        f'<div class="lane {escape(role)}"><div class=who>{escape(node)}</div>'
        f'<div class=track style="{style}">{bars}</div></div>'
    )


def _levels(rows: list[TraceRow]) -> list[int]:
    """Return a level for each span, such that overlapping spans have different levels."""
    free_at_ns: list[int] = []
    levels = []
    for row in rows:
        fitting = [n for n, at_ns in enumerate(free_at_ns) if at_ns <= row.span.began_ns]
        level = fitting[0] if fitting else len(free_at_ns)
        free_at_ns[level : level + 1] = [row.span.ended_ns]
        levels.append(level)
    return levels


def _box(row: TraceRow, window: Window, level: int) -> str:
    left, right = window.percent(row.span.began_ns), window.percent(row.span.ended_ns)
    label = f"{row.span.name} {_ms(row.span.duration_s)}"
    tip = f"{label} · {note_of(row.span)}" if note_of(row.span) else label
    place = f"left:{left:.3f}%;width:{right - left:.3f}%;top:calc({level}*var(--line))"
    fitting = [text for text in (label, row.span.name) if len(text) * LETTER_WIDTH < right - left]
    text = escape(fitting[0]) if fitting else ""
    kinds = f"{_kind(row)} {row.span.name} {'' if text else 'bare'}"
    return f'<div class="box {kinds}" style="{place}" title="{escape(tip)}">{text}</div>'


def _first_token(trace: Trace, window: Window) -> str:
    ttft_s = trace.time_to_first_token_s
    if ttft_s is None:
        return ""
    left = window.percent(trace.began_ns + round(ttft_s * 1e9))
    side = "flip" if left > 50 else ""
    text = f"<b>first token, {_ms(ttft_s)}</b>"
    return f'<div class=over><div class="mark {side}" style="left:{left:.3f}%">{text}</div></div>'


def _axis(window: Window) -> str:
    total_s = (window.ended_ns - window.began_ns) / 1e9
    ticks = "".join(
        f'<span style="left:{100 * n / TICKS:.1f}%">{_ms(total_s * n / TICKS)}</span>'
        for n in range(TICKS + 1)
    )
    return f"<div class=axis><div class=ticks>{ticks}</div></div>"


def _waterfall(trace: Trace, window: Window) -> str:
    return "<div class=fall>" + "".join(_fall_row(row, window) for row in trace.rows) + "</div>"


def _fall_row(row: TraceRow, window: Window) -> str:
    left, right = window.percent(row.span.began_ns), window.percent(row.span.ended_ns)
    bar = f"left:{left:.3f}%;width:{right - left:.3f}%"
    indent = f"padding-left:{row.depth * 1.1:.1f}em"
    return (
        f'<details class="{_kind(row)}"><summary>'
        f'<span class=name style="{indent}">{escape(row.span.name)}</span>'
        f"<span class=who>{escape(row.node)}</span>"
        f"<span class=ms>{_ms(row.span.duration_s)}</span>"
        f'<span class=track><i style="{bar}"></i></span>'
        f"<span class=note>{escape(note_of(row.span))}</span>"
        f"</summary>{_details(row)}</details>"
    )


def _render_related(trace: Trace, kept: Sequence[Trace]) -> Iterator[str]:
    heading, found = related_to(trace, kept)
    rows = "".join(f"<tr><th>{trace_id:032x}<td>{escape(what)}</tr>" for trace_id, what in found)
    if found:
        yield f"<h2>{heading.capitalize()}</h2><table class=related>{rows}</table>"


def _details(row: TraceRow) -> str:
    span = row.span
    lines = [(name, _value(value)) for name, value in sorted(span.attributes.items())]
    lines += [
        (
            f"event {event.name}",
            f"after {_ms((event.at_ns - span.began_ns) / 1e9)} {_event_attributes(event)}",
        )
        for event in span.events
    ]
    lines += [("link to span", f"{link.span_id:016x}") for link in span.links]
    lines.append(("span", f"{span.span_id:016x}"))
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in lines)
    return f"<table>{rows}</table>"


def _event_attributes(event: SpanEvent) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in event.attributes.items())


def _kind(row: TraceRow) -> str:
    return f"{escape(row.role)} {'error' if row.span.status is SpanStatus.ERROR else ''}"


def _value(value: AttributeValue) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
