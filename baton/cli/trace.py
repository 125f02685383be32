"""`baton trace`: the traces that this machine's processes keep."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.examples import examples
from baton.cli.options import can_be_written
from baton.cli.telemetry import TRACE_DIR_VARIABLE, trace_folder
from engine.errors import EngineError
from telemetry.store import read_spans
from telemetry.traces import Trace, find_trace, traces_of

UNCUT = 160  # columns where no terminal says how wide it is

trace = typer.Typer(help="See where a request's time went.", no_args_is_help=True)

Folder = Annotated[
    str,
    typer.Option(
        "--trace-dir",
        envvar=TRACE_DIR_VARIABLE,
        help="Folder that traces are kept in; the user's cache if left out.",
    ),
]
Wanted = Annotated[
    str,
    typer.Argument(
        help="The beginning of a trace's id, or a request's id; the newest if left out."
    ),
]


class NoSuchTrace(EngineError):
    """Nothing of that name is kept."""


@trace.command(
    name="list", epilog=examples("baton trace list", "baton trace list --limit 100 --failed")
)
def list_traces(
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest last.")] = 20,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only those that did not end well.")
    ] = False,
    trace_dir: Folder = "",
) -> None:
    """List the traces that are kept."""
    from rich.console import Console
    from rich.table import Table

    from telemetry import names

    found = [one for one in _kept(trace_dir) if not failed or one.outcome != "ok"]
    table = Table(box=None, header_style="dim")
    for heading in ("trace", "began", "request", "outcome", "prefill"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "first token ms", "tokens in", "out", "attempts"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found[-limit:]:
        ttft_s = one.time_to_first_token_s
        table.add_row(
            f"{one.trace_id:032x}"[:16],
            f"{datetime.fromtimestamp(one.began_ns / 1e9):%H:%M:%S}",
            _shown(one.attribute(names.RESPONSE_ID)),
            one.outcome,
            _shown(one.attribute(names.SERVED)),
            f"{one.duration_s * 1000:.1f}",
            "" if ttft_s is None else f"{ttft_s * 1000:.1f}",
            _shown(one.attribute(names.INPUT_TOKENS)),
            _shown(one.attribute(names.OUTPUT_TOKENS)),
            _shown(one.attribute(names.ATTEMPTS)),
        )
    console = Console()
    console.print(table, width=None if console.is_terminal else UNCUT)


@trace.command(
    epilog=examples(
        "baton trace show", "baton trace show 4bf92f35", "baton trace show --html trace.html"
    )
)
def show(
    wanted: Wanted = "",
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page to this file instead; it needs no network.", callback=can_be_written
        ),
    ] = None,
    trace_dir: Folder = "",
) -> None:
    """Draw a trace as a waterfall."""
    from rich.console import Console

    from baton.traces.page import page_of
    from baton.traces.terminal import show_waterfall

    found = _wanted(trace_dir, wanted)
    if html is None:
        console = Console()
        console.width = console.width if console.is_terminal else UNCUT
        show_waterfall(console, found)
        return
    html.write_text(page_of(found), encoding="utf-8")
    print(f"wrote {html}")


@trace.command(epilog=examples("baton trace export --otlp-endpoint http://127.0.0.1:4317"))
def export(
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
            help="Collector to send to, by OTLP over gRPC.",
        ),
    ],
    wanted: Annotated[
        str, typer.Argument(help="As with show; all that are kept if left out.")
    ] = "",
    trace_dir: Folder = "",
) -> None:
    """Send traces that are kept to a collector."""
    from telemetry.export import send_all

    found = [_wanted(trace_dir, wanted)] if wanted else _kept(trace_dir)
    num_spans = send_all(otlp_endpoint, [told for one in found for told in one.told])
    print(f"sent {len(found)} traces, {num_spans} spans, to {otlp_endpoint}")


def _kept(trace_dir: str) -> list[Trace]:
    return traces_of(read_spans(trace_folder(trace_dir)))


def _wanted(trace_dir: str, wanted: str) -> Trace:
    kept = _kept(trace_dir)
    found = find_trace(kept, wanted)
    if found is None:
        where = trace_folder(trace_dir)
        what = f"no trace and no request is called {wanted!r}" if kept else "no trace is kept"
        raise NoSuchTrace(f"{what} in {where}; see baton trace list, or name another --trace-dir")
    return found


def _shown(value: object) -> str:
    return "" if value is None else str(value)
