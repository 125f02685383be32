"""`baton trace`: the traces that this machine's processes keep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.examples import examples
from baton.cli.options import can_be_written
from baton.cli.telemetry import TRACE_DIR_VARIABLE, trace_folder
from engine.errors import EngineError, InvalidConfig
from telemetry.store import read_spans
from telemetry.traces import Trace, find_trace, traces_of

if TYPE_CHECKING:
    from rich.console import Console

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
    name="list",
    epilog=examples(
        "baton trace list", "baton trace list --limit 100 --failed", "baton trace list --steps"
    ),
)
def list_traces(
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest last.")] = 20,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only those that did not end well.")
    ] = False,
    steps: Annotated[
        bool, typer.Option("--steps", help="Engine steps (--trace-step-ratio) and not requests.")
    ] = False,
    trace_dir: Folder = "",
) -> None:
    """List the traces that are kept."""
    from baton.traces.lists import table_of_requests, table_of_steps

    kept = [one for one in _kept(trace_dir) if one.is_step is steps]
    found = [one for one in kept if not failed or one.outcome != "ok"][-limit:]
    if not found:
        print(f"no such trace is kept in {_folder(trace_dir)}", file=sys.stderr)
        return
    table_of = table_of_steps if steps else table_of_requests
    console = _console()
    console.print(table_of(found, console.width))


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
    from baton.traces.page import page_of
    from baton.traces.terminal import show_related, show_waterfall

    kept = _kept(trace_dir)
    found = _wanted(kept, trace_dir, wanted)
    if html is None:
        console = _console()
        show_waterfall(console, found)
        show_related(console, found, kept)
        return
    html.write_text(page_of(found, kept), encoding="utf-8")
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

    kept = _kept(trace_dir)
    found = [_wanted(kept, trace_dir, wanted)] if wanted else kept
    num_spans = send_all(otlp_endpoint, [told for one in found for told in one.told])
    print(f"sent {len(found)} traces, {num_spans} spans, to {otlp_endpoint}")


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=UNCUT)


def _folder(trace_dir: str) -> Path:
    folder = trace_folder(trace_dir)
    if folder is None:
        raise InvalidConfig(f"--trace-dir {trace_dir} keeps no traces; name the folder of some")
    if folder.exists() and not folder.is_dir():
        raise InvalidConfig(f"--trace-dir {folder} is no folder; name the folder of some traces")
    return folder


def _kept(trace_dir: str) -> list[Trace]:
    return traces_of(read_spans(_folder(trace_dir)))


def _wanted(kept: list[Trace], trace_dir: str, wanted: str) -> Trace:
    found = find_trace(kept, wanted)
    if found is None:
        where = _folder(trace_dir)
        what = f"no trace and no request is called {wanted!r}" if kept else "no trace is kept"
        raise NoSuchTrace(f"{what} in {where}; see baton trace list, or name another --trace-dir")
    return found
