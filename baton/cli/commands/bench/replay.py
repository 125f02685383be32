"""`baton bench replay`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.bench.plotting import need_matplotlib
from baton.bench.replay.config import TRACE, ReplayBench
from baton.bench.serve.figures import Slo
from baton.cli.commands.bench.progress import requests_bar
from baton.cli.commands.bench.replay_tables import show_figures
from baton.cli.options.connection import connect_to_measure
from baton.cli.options.output import JsonFile, check_writable_file
from baton.cli.show import console, write_json
from baton.cli.signatures import inherit_options, make
from baton.core.options import OUTPUT, Option

if TYPE_CHECKING:
    from baton.bench.replay.run import ReplayRun

TARGET = "Target"
OBJECTIVES = "Objectives"
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def _check_plot(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in PLOT_SUFFIXES:
        raise typer.BadParameter(f"{path}: the name must end with {', '.join(PLOT_SUFFIXES)}")
    return check_writable_file(path)


@inherit_options(ReplayBench, connect_to_measure)
def replay(
    file: Annotated[
        Path,
        typer.Argument(
            help="Trace: Mooncake JSONL, Azure CSV, or a tar archive or folder of Weka sessions; "
            ".gz is read directly.",
        ),
    ],
    address: Annotated[
        str,
        Option("host:port of a running router (gRPC).", TARGET, flags=("--router", "--address")),
    ] = "127.0.0.1:50051",
    format_name: Annotated[
        str, Option("mooncake, weka or azure. Default: detected.", TRACE, flags=("--format",))
    ] = "",
    num_requests: Annotated[
        int | None, Option("Replay only the first requests. Default: all.", TRACE, at_least=1)
    ] = None,
    slo_ttft_ms: Annotated[
        float, Option("Time to the first token of a good answer.", OBJECTIVES, at_least=0)
    ] = 500.0,
    slo_itl_ms: Annotated[
        float, Option("99th percentile of a good answer's gaps.", OBJECTIVES, at_least=0)
    ] = 50.0,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw a plot to this file (.png, .svg or .pdf).",
            callback=_check_plot,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    **given: Any,
) -> None:
    """Replay a recorded trace, open loop, and report how much KV was reused, and from where.

    Prompts have random tokens, and equal ones where the trace has equal blocks. Ctrl-C ends the
    replay and reports the requests completed so far.
    """
    from baton.bench.replay.formats import read_trace
    from baton.bench.replay.run import bench_router

    if plot is not None:
        need_matplotlib()
    trace = read_trace(file, format_name)
    trace = replace(trace, requests=trace.requests[:num_requests])
    what = make(ReplayBench, given)
    with requests_bar() as update:
        run = bench_router(what, trace, address, make(connect_to_measure, given), update)
    slo = Slo(ttft=slo_ttft_ms / 1e3, itl=slo_itl_ms / 1e3)
    settings = {"format": trace.format, **asdict(what), "slo": asdict(slo)}
    _report(run, slo, settings, json_file, plot)


def _report(
    run: ReplayRun,
    slo: Slo,
    settings: dict[str, object],
    json_file: Path | None,
    plot: Path | None,
) -> None:
    from baton.bench.replay.figures import request_rows, summarise
    from baton.bench.replay.plots import draw

    figures = summarise(run, slo)
    if run.is_cut_short:
        console(stderr=True).print("interrupted: these are the requests completed so far")
    show_figures(f"{settings['format']}", figures)
    values = {"what": settings, "figures": asdict(figures), "requests": request_rows(run)}
    write_json(json_file, values)
    if plot is not None and draw(run, plot):
        print(plot)
