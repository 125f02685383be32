"""Waterfall of a trace for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.core.units import format_bytes
from baton.telemetry import names
from baton.telemetry.tracing.spans import SpanStatus
from baton.telemetry.tracing.traces import (
    Trace,
    TraceRow,
    failures_of,
    fetches_of,
    note_of,
    related_to,
)

COLOURS = {"router": "cyan", "prefill": "yellow", "decode": "green", "encode": "magenta"}
WIDE = 120  # minimum width for notes
MIN_BAR_WIDTH = 12
FULL, FIRST_TOKEN, FAILED = "━", "◆", "✗"


def show_waterfall(console: Console, trace: Trace) -> None:
    console.print(Text(f"trace {trace.trace_id:032x}", style="bold"))
    console.print(Text(headline(trace)), soft_wrap=True)
    has_notes = console.width >= WIDE
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=True, header_style="dim")
    table.add_column("span", no_wrap=True)
    table.add_column("where", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    free_width = _free_width(console.width, trace)
    width = max(MIN_BAR_WIDTH, free_width // 2 if has_notes else free_width)
    table.add_column(_axis(trace, width), no_wrap=True, width=width)
    if has_notes:
        table.add_column("", no_wrap=True, overflow="ellipsis", max_width=free_width - width - 1)
    for row in trace.rows:
        took = Text(f"{row.span.duration_s * 1000:.1f}")
        cells = [_name(row), Text(row.node, style=COLOURS.get(row.role, "")), took]
        notes = [Text(note_of(row.span), style="dim")] if has_notes else []
        table.add_row(*cells, _bar(row, trace, width), *notes)
    console.print(table)
    if not has_notes:
        _show_fetches(console, trace)
        _show_failures(console, trace)


def show_related(console: Console, trace: Trace, kept: Sequence[Trace]) -> None:
    """List the traces linked to this one, if there are any."""
    heading, found = related_to(trace, kept)
    if found:
        console.print(Text(heading, style="dim"))
    for trace_id, what in found:
        console.print(Text(f"  {trace_id:032x}  {what}"), soft_wrap=True)


def _show_fetches(console: Console, trace: Trace) -> None:
    """List what was loaded and pulled below the waterfall, where notes do not fit."""
    for row in trace.rows:
        for fetch in fetches_of(row.span):
            line = f"{row.span.name} on {row.node}: {fetch}"
            console.print(Text(line, style="dim"), soft_wrap=True)


def _show_failures(console: Console, trace: Trace) -> None:
    """List the failures below the waterfall, where notes do not fit."""
    for failure in failures_of(trace):
        console.print(Text(f"{FAILED} {failure}", style="red"), soft_wrap=True)


def headline(trace: Trace) -> str:
    """Summarize the request or step in one line."""
    if trace.is_step:
        return _headline_of_step(trace)
    ttft_s, num_bytes = trace.time_to_first_token_s, trace.attribute(names.KV_BYTES)
    parts = [
        f"request {trace.attribute(names.RESPONSE_ID) or 'unknown'}",
        f"{trace.outcome}",
        f"{trace.duration_s * 1000:.1f} ms",
    ]
    if ttft_s is not None:
        parts.append(f"first token after {ttft_s * 1000:.1f} ms")
    if trace.attribute(names.OUTPUT_TOKENS) is not None:
        input_tokens, output_tokens = (
            trace.attribute(names.INPUT_TOKENS),
            trace.attribute(names.OUTPUT_TOKENS),
        )
        parts.append(f"{input_tokens} tokens in, {output_tokens} out")
    served = trace.attribute(names.SERVED)
    if served == "migrated":
        parts.append(f"migrated, {trace.attribute(names.ATTEMPTS)} attempts")
    elif served:
        parts.append(f"prefill {served}")
    if isinstance(num_bytes, int) and num_bytes:
        parts.append(f"{format_bytes(num_bytes)} of KV moved")
    return " · ".join(parts)


def _headline_of_step(trace: Trace) -> str:
    row = trace.rows[0]
    number, left_out = (trace.attribute(n) for n in (names.STEP_NUMBER, names.STEP_LINKS_LEFT_OUT))
    parts = [f"step {number} of {row.node}", f"{trace.duration_s * 1000:.1f} ms", note_of(row.span)]
    if left_out:
        parts.append(f"{left_out} more traced requests than a step has links")
    return " · ".join(parts)


def _free_width(width: int, trace: Trace) -> int:
    """Return the width left for bars and notes."""
    name = max(len(_name(row)) for row in trace.rows)
    node = max(len(row.node) for row in trace.rows)
    return width - name - node - 14


def _name(row: TraceRow) -> Text:
    """Return the span's name behind its tree lines."""
    ancestors = ["   " if is_last else "│  " for is_last in row.branches[:-1]]
    own = ["└─ " if is_last else "├─ " for is_last in row.branches[-1:]]
    style = "bold red" if row.span.status is SpanStatus.ERROR else ""
    return Text.assemble(("".join(ancestors + own), "dim"), (row.span.name, style))


def _axis(trace: Trace, width: int) -> Text:
    end = f"{trace.duration_s * 1000:.1f} ms"
    return Text("0" + end.rjust(width - 1))


def _bar(row: TraceRow, trace: Trace, width: int) -> Text:
    span, total_ns = row.span, max(1, trace.ended_ns - trace.began_ns)
    began = min(width - 1, (span.began_ns - trace.began_ns) * width // total_ns)
    ended = min(width, -(-(span.ended_ns - trace.began_ns) * width // total_ns))
    length = max(1, ended - began)
    cells = " " * began + FULL * length
    style = "red" if span.status is SpanStatus.ERROR else COLOURS.get(row.role, "")
    firsts = [event.at_ns for event in span.events if event.name == names.FIRST_TOKEN]
    for at_ns in firsts:
        place = min(width - 1, (at_ns - trace.began_ns) * width // total_ns)
        cells = cells[:place] + FIRST_TOKEN + cells[place + 1 :]
    return Text(cells, style=style)
