"""`python -m benchmarks replay`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.bench.load import Slo
from baton.bench.plots import need_matplotlib
from baton.cli.options.connection import connect_to_measure
from baton.cli.options.output import JsonFile, check_writable_file
from baton.cli.show import console, requests_bar, show_table, write_json
from baton.cli.signatures import inherit_options, make
from baton.core.options import OUTPUT, Option
from benchmarks.replay.config import TRACE, ReplayBench

if TYPE_CHECKING:
    from benchmarks.replay.figures import ReplayFigures
    from benchmarks.replay.run import ReplayRun

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
    from benchmarks.replay.formats import read_trace
    from benchmarks.replay.run import bench_router

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
    from benchmarks.replay.figures import request_rows, summarise
    from benchmarks.replay.plots import draw

    figures = summarise(run, slo)
    if run.is_cut_short:
        console(stderr=True).print("interrupted: these are the requests completed so far")
    show_figures(f"{settings['format']}", figures)
    values = {"what": settings, "figures": asdict(figures), "requests": request_rows(run)}
    write_json(json_file, values)
    if plot is not None and draw(run, plot):
        print(plot)


def show_figures(name: str, figures: ReplayFigures) -> None:
    summary = [{"what": what, "figure": figure} for what, figure in _summary(figures).items()]
    show_table(f"replay of {name}", summary)
    num_tokens = figures.num_prompt_tokens
    _show_tokens("prompt tokens by source", "source", figures.tokens_by_source, num_tokens)
    _show_tokens(
        "prompt tokens computed again, by where they were",
        "computed before by",
        figures.lost_by_reason,
        num_tokens,
    )
    if figures.errors:
        rows = [{"reason": one, "requests": count} for one, count in figures.errors.items()]
        show_table("failures", rows)


def _summary(figures: ReplayFigures) -> dict[str, str]:
    of_ideal = figures.reuse_of_ideal
    return {
        "answered": f"{figures.num_answered} of {figures.num_planned}",
        "failed": str(sum(figures.errors.values())),
        "truncated": f"{figures.num_truncated} ({figures.num_cut_tokens} tokens)",
        "late sends": str(figures.num_late),
        "prompt tokens": str(figures.num_prompt_tokens),
        "distinct tokens": str(figures.num_distinct_tokens),
        "reuse": f"{figures.reuse:.4f}",
        "ideal reuse": f"{figures.ideal_reuse:.4f}",
        "reuse/ideal": "-" if of_ideal is None else f"{of_ideal:.4f}",
        **_quantiles(figures),
        "good requests/s": f"{figures.good_requests_per_s:.2f}",
        "good tokens/s": f"{figures.good_tokens_per_s:.2f}",
    }


def _quantiles(figures: ReplayFigures) -> dict[str, str]:
    return {
        f"{name} p50, p99 ms": f"{one.p50:.1f}, {one.p99:.1f}"
        for name, one in (("TTFT", figures.ttft_ms), ("ITL", figures.itl_ms))
        if one is not None
    }


def _show_tokens(title: str, column: str, counts: Mapping[str, int], num_tokens: int) -> None:
    rows = [
        {column: name, "tokens": count, "share": f"{count / num_tokens:.4f}"}
        for name, count in counts.items()
    ]
    if rows:
        show_table(title, rows)
