"""`baton bench replay`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.commands.bench.progress import requests_bar
from baton.cli.commands.bench.replay_tables import show_figures
from baton.cli.options.output import OUTPUT_PANEL, JsonFile, check_writable_file
from baton.cli.options.security import ClientTokenFile, client_tls
from baton.cli.show import console, write_json
from baton.cli.signatures import inherit_options

if TYPE_CHECKING:
    from baton.bench.replay.benchmark import Connect, ReplayBench
    from baton.bench.replay.run import ReplayedRequest, ReplayRun
    from baton.bench.serve.figures import Slo

TRACE_PANEL = "Trace"
TARGET_PANEL = "Target"
OBJECTIVE_PANEL = "Objectives"
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def _trace(help: str, *names: str, **given: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel=TRACE_PANEL, **given)


def _objective(help: str) -> Any:  # noqa: A002
    return typer.Option(help=help, rich_help_panel=OBJECTIVE_PANEL, min=0.0)


def _check_plot(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in PLOT_SUFFIXES:
        raise typer.BadParameter(f"{path}: the name must end with {', '.join(PLOT_SUFFIXES)}")
    return check_writable_file(path)


@inherit_options(client_tls)
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
        typer.Option(
            "--router",
            "--address",
            help="host:port of a running router (gRPC).",
            rich_help_panel=TARGET_PANEL,
        ),
    ] = "127.0.0.1:50051",
    token_file: ClientTokenFile = None,
    format_name: Annotated[
        str, _trace("mooncake, weka or azure. Default: detected.", "--format")
    ] = "",
    num_requests: Annotated[
        int | None, _trace("Replay only the first requests. Default: all.", min=1)
    ] = None,
    time_scale: Annotated[
        float, _trace("Factor of all times: 0.1 is ten times as fast; 0: all at once.", min=0.0)
    ] = 1.0,
    block_tokens: Annotated[
        int | None,
        _trace(
            "Tokens that replay a block of the trace (512 tokens in Mooncake, 64 in Weka); all "
            "lengths are scaled alike. Default: lengths as recorded.",
            min=1,
        ),
    ] = None,
    max_output_tokens: Annotated[int | None, _trace("Longest answer.", min=1)] = None,
    use_answers: Annotated[
        bool,
        _trace(
            "Continue sessions with the model's answers, instead of the recorded ones.",
            "--use-answers",
        ),
    ] = False,
    max_in_flight: Annotated[
        int, _trace("Maximum requests in flight; waiting for a slot counts as latency.", min=1)
    ] = 1000,
    block_size: Annotated[
        int, _trace("Tokens per KV block of the nodes; the ideal reuse is in such blocks.", min=1)
    ] = 16,
    seed: Annotated[int, _trace("Seed of the token ids.")] = 0,
    slo_ttft_ms: Annotated[float, _objective("Time to the first token of a good answer.")] = 500.0,
    slo_itl_ms: Annotated[float, _objective("99th percentile of a good answer's gaps.")] = 50.0,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw a plot to this file (.png, .svg or .pdf).",
            callback=_check_plot,
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    **given: Any,
) -> None:
    """Replay a recorded trace, open loop, and report how much KV was reused, and from where.

    Prompts have random tokens, and equal ones where the trace has equal blocks. Ctrl-C ends the
    replay and reports the requests completed so far.
    """
    from baton.bench.plotting import need_matplotlib
    from baton.bench.replay.benchmark import ReplayBench
    from baton.bench.replay.formats import read_trace
    from baton.bench.replay.run import Replay
    from baton.bench.serve.figures import Slo

    if plot is not None:
        need_matplotlib()
    trace = read_trace(file, format_name)
    trace = replace(trace, requests=trace.requests[:num_requests])
    what = ReplayBench(
        Replay(trace, time_scale, use_answers, max_in_flight, block_size),
        block_tokens,
        max_output_tokens,
        seed,
    )
    run = _run(what, address, _connect(given, token_file))
    _report(run, what, Slo(ttft=slo_ttft_ms / 1e3, itl=slo_itl_ms / 1e3), json_file, plot)


def _connect(for_tls: dict[str, Any], token_file: Path | None) -> Connect:
    """Return a factory of clients that do not retry: failures are part of the measurement."""
    from baton.client import AsyncClient, Retries
    from baton.rpc.security.token import read_tokens

    tls = client_tls(**for_tls)
    token = None if token_file is None else read_tokens(token_file)[0]
    return lambda address: AsyncClient(
        address, tls=tls, token=token, retries=Retries(max_attempts=1)
    )


def _run(what: ReplayBench, address: str, connect: Connect) -> ReplayRun:
    from baton.bench.replay.benchmark import bench_router

    num_planned, num_ended = len(what.replay.trace.requests), 0
    with requests_bar() as update:

        def on_ended(_: ReplayedRequest) -> None:
            nonlocal num_ended
            num_ended += 1
            update(what.replay.trace.format, num_ended, num_planned)

        return bench_router(what, address, connect, on_ended)


def _report(
    run: ReplayRun, what: ReplayBench, slo: Slo, json_file: Path | None, plot: Path | None
) -> None:
    from baton.bench.replay.figures import request_rows, summarise
    from baton.bench.replay.plots import draw

    figures = summarise(run, slo)
    if run.is_cut_short:
        console(stderr=True).print("interrupted: these are the requests completed so far")
    show_figures(what.replay.trace.format, figures)
    values = {
        "what": _settings(what, slo),
        "figures": asdict(figures),
        "requests": request_rows(run),
    }
    write_json(json_file, values)
    if plot is not None and draw(run, plot):
        print(plot)


def _settings(what: ReplayBench, slo: Slo) -> dict[str, object]:
    return {
        "format": what.replay.trace.format,
        "time_scale": what.replay.time_scale,
        "block_tokens": what.block_tokens,
        "max_output_tokens": what.max_output_tokens,
        "use_answers": what.replay.use_answers,
        "max_in_flight": what.replay.max_in_flight,
        "block_size": what.replay.block_size,
        "seed": what.seed,
        "slo": asdict(slo),
    }
