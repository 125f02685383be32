"""`baton trace`: list, draw and export the traces stored on this machine."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.command import Command, CommandGroup
from baton.cli.examples import examples
from baton.cli.options.output import check_writable_file
from baton.cli.show import console
from baton.core.errors import InvalidConfig, NamedError
from baton.core.options import Option
from baton.core.units import format_count
from baton.telemetry.options import TRACE_DIR_VARIABLE, trace_folder
from baton.telemetry.tracing.store import read_spans
from baton.telemetry.tracing.traces import Trace, find_trace, traces_of

OPENS_PAGE = "baton.opens_page"
UNCUT = 160  # columns if there is no terminal

trace = typer.Typer(cls=CommandGroup, help="Show the timeline of requests.", no_args_is_help=True)

Folder = Annotated[
    str,
    Option(
        "Folder of stored traces. Default: in the user's cache folder.",
        variable=TRACE_DIR_VARIABLE,
    ),
]
Wanted = Annotated[
    str,
    typer.Argument(help="Prefix of a trace id, or a request id. Default: the newest trace."),
]


class NoSuchTrace(NamedError):
    """No stored trace has that id."""


@trace.command(
    name="list",
    epilog=examples(
        "baton trace list", "baton trace list --limit 100 --failed", "baton trace list --steps"
    ),
)
def list_traces(
    limit: Annotated[int, Option("Maximum number of traces; the newest is last.", at_least=1)] = 20,
    failed: Annotated[bool, Option("List only failed requests.", flags=("--failed",))] = False,
    steps: Annotated[
        bool,
        Option("List engine steps (--trace-step-ratio) instead of requests.", flags=("--steps",)),
    ] = False,
    trace_dir: Folder = "",
) -> None:
    """List stored traces."""
    from baton.traces.lists import REQUEST_COLUMNS, STEP_COLUMNS, table_of

    kept = [one for one in _kept(trace_dir) if one.is_step is steps]
    found = [one for one in kept if not failed or one.outcome != "ok"][-limit:]
    if not found:
        print(f"no matching trace in {_folder(trace_dir)}", file=sys.stderr)
        return
    screen = console(wide=UNCUT)
    columns = STEP_COLUMNS if steps else REQUEST_COLUMNS
    screen.print(table_of(columns, found, screen.width))


class ShowCommand(Command):
    """Command whose --html needs no file. Typer cannot declare such options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        pairs = pairwise([*args, "-"])
        others = [one for one, after in pairs if one != "--html" or not after.startswith("-")]
        ctx.meta[OPENS_PAGE] = others != args
        rest: list[str] = super().parse_args(ctx, others)
        return rest


def _new_page() -> Path:
    """Create an empty file for a page, which only this user can read."""
    descriptor, path = tempfile.mkstemp(prefix="baton-trace-", suffix=".html")
    os.close(descriptor)
    return Path(path)


@trace.command(
    cls=ShowCommand,
    epilog=examples(
        "baton trace show", "baton trace show 4bf92f35 --html", "baton trace show --html trace.html"
    ),
)
def show(
    context: typer.Context,
    wanted: Wanted = "",
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a self-contained HTML page to this file instead; without a file, open "
            "the page in a browser.",
            callback=check_writable_file,
        ),
    ] = None,
    trace_dir: Folder = "",
) -> None:
    """Draw a trace as a waterfall."""
    from baton.traces.page import render_page
    from baton.traces.terminal import show_related, show_waterfall

    kept = _kept(trace_dir)
    found = _find_trace(kept, trace_dir, wanted)
    opens_page = context.meta[OPENS_PAGE]
    if html is None and not opens_page:
        screen = console(wide=UNCUT)
        show_waterfall(screen, found)
        show_related(screen, found, kept)
        return
    page = html or _new_page()
    page.write_text(render_page(found, kept), encoding="utf-8")
    print(f"wrote {page}")
    if opens_page:
        webbrowser.open(page.as_uri())


@trace.command(epilog=examples("baton trace export --otlp-endpoint http://127.0.0.1:4317"))
def export(
    otlp_endpoint: Annotated[
        str,
        Option("OTLP/gRPC endpoint of the collector.", variable="OTEL_EXPORTER_OTLP_ENDPOINT"),
    ],
    wanted: Annotated[
        str,
        typer.Argument(help="Prefix of a trace id, or a request id. Default: all stored traces."),
    ] = "",
    trace_dir: Folder = "",
) -> None:
    """Send stored traces to a collector."""
    from baton.telemetry.tracing.otlp import send_all

    kept = _kept(trace_dir)
    found = [_find_trace(kept, trace_dir, wanted)] if wanted else kept
    num_spans = send_all(otlp_endpoint, [span for trace in found for span in trace.exported_spans])
    traces, spans = format_count(len(found), "trace"), format_count(num_spans, "span")
    print(f"sent {traces}, {spans}, to {otlp_endpoint}")


def _folder(trace_dir: str) -> Path:
    folder = trace_folder(trace_dir)
    if folder is None:
        raise InvalidConfig(
            f"--trace-dir {trace_dir} keeps no traces; pass a folder of stored traces"
        )
    if folder.exists() and not folder.is_dir():
        raise InvalidConfig(f"--trace-dir {folder} is not a folder; pass a folder of stored traces")
    return folder


def _kept(trace_dir: str) -> list[Trace]:
    return traces_of(read_spans(_folder(trace_dir)))


def _find_trace(kept: list[Trace], trace_dir: str, wanted: str) -> Trace:
    found = find_trace(kept, wanted)
    if found is None:
        where = _folder(trace_dir)
        what = f"no trace or request has the id {wanted!r}" if kept else "no trace is stored"
        raise NoSuchTrace(f"{what} in {where}; see baton trace list, or pass another --trace-dir")
    return found
