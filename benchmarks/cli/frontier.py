"""`python -m benchmarks frontier`."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json
from baton.core.errors import InvalidConfig
from benchmarks.partial_results import report_on_exit
from benchmarks.peers.engine_options import (
    BatonSteps,
    BenchModel,
    PlotFile,
    VllmApart,
    VllmChunks,
    VllmVenv,
    announced,
    chosen_engines,
)

if TYPE_CHECKING:
    from benchmarks.peers.frontier import Goodput, RateRun, Sweep, SweepResult
    from benchmarks.peers.warm_engines import Start


def frontier(
    model: BenchModel = "models/demo",
    baton_steps: BatonSteps = "default",
    vllm_venv: VllmVenv = None,
    vllm_chunks: VllmChunks = "default,128",
    vllm_apart: VllmApart = "",
    rates: Annotated[str, typer.Option(help="Requests per second.")] = "0.1,0.2,0.3,0.4",
    seconds: Annotated[float, typer.Option(help="Seconds of load at each rate.")] = 90.0,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    ttft: Annotated[
        str, typer.Option(help="Limits of the time to first token, in seconds.")
    ] = "2,4,8",
    itl: Annotated[
        str, typer.Option(help="Limits of the inter-token latency, in milliseconds.")
    ] = "50,75,100,150,200,300,500,1000",
    of: Annotated[
        str, typer.Option(help="Statistic of an answer's gaps that --itl limits: mean or p99.")
    ] = "mean",
    share: Annotated[
        float, typer.Option(help="Share of the requests that must meet both limits.")
    ] = 0.95,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Do not measure: apply other limits, none wider, to a file written by --json.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the requests and their arrival times.")] = 0,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Find the highest rate at which Baton, colocated or not, and vLLM meet latency limits.

    Each engine gets the same requests over HTTP at increasing rates, until it misses even the
    widest limits. One sweep serves all limits; --json keeps every request.
    """
    from baton.bench.plots import need_matplotlib
    from benchmarks.peers.frontier import Sweep, read_sweep

    limits: dict[str, Any] = {
        "first_token_limits_s": _decimals(ttft),
        "itl_limits_ms": _decimals(itl),
        "itl": of,
        "share": share,
    }
    if plot is not None:
        need_matplotlib()
    if measured is None:
        bench = replace(Sweep(_decimals(rates), seconds, prompt, answer, seed=seed), **limits)
        engines = chosen_engines(model, baton_steps, vllm_venv, vllm_chunks, vllm_apart)
        measure(bench, engines, plot, json_file)
    else:
        then = read_sweep(measured)
        if not then.is_whole:
            print(f"baton: warning: {measured} is from an interrupted sweep", file=sys.stderr)
        _report(replace(then, bench=replace(then.bench, **limits)), plot, json_file)


def measure(
    bench: Sweep, engines: dict[str, Start], plot: Path | None, json_file: Path | None
) -> None:
    """Run the sweep and report the results, also partial ones after an interruption."""
    from benchmarks.peers.frontier import SweepResult, run

    runs: list[RateRun] = []

    def report(is_whole: bool) -> None:
        _report(SweepResult(bench, runs, is_whole), plot, json_file)

    with report_on_exit(runs, report), console(stderr=True).status("starting") as status:

        def on_run(one: RateRun) -> None:
            runs.append(one)
            counts = f"{len(one.answers)} answers, {len(one.errors)} failed"
            status.console.print(f"{one.engine}, {one.rate:g} requests/s: {counts}")

        run(bench, announced(engines, status.update), on_run)


def _report(measured: SweepResult, plot: Path | None, json_file: Path | None) -> None:
    from benchmarks.peers.frontier import frontier as frontier_of
    from benchmarks.plots.frontier import draw

    found = frontier_of(measured.bench, measured.runs)
    values = {
        "what": asdict(measured.bench),
        "is_whole": measured.is_whole,
        "goodput": [asdict(one) for one in found],
        "runs": [asdict(one) for one in measured.runs],
    }
    write_json(json_file, values)
    _show(found, measured.bench.itl)
    if plot is not None:
        draw(measured.bench, found, plot)


def _show(found: list[Goodput], kind: str) -> None:
    """Show one table per limit of the first token, with one column per limit of the gaps."""
    for limit_s in dict.fromkeys(one.first_token_limit_s for one in found):
        rows: dict[str, dict[str, object]] = {}
        for one in found:
            if one.first_token_limit_s == limit_s:
                row = rows.setdefault(one.engine, {"engine": one.engine})
                row[f"{one.itl_limit_ms:g} ms"] = one.requests_per_s
        title = f"requests/s with the first token within {limit_s:g} s, by limit of the {kind} gap"
        show_table(title, list(rows.values()))


def _decimals(written: str) -> tuple[float, ...]:
    try:
        return tuple(sorted(float(one) for one in written.split(",")))
    except ValueError:
        raise InvalidConfig(
            f"{written!r} is not a list of numbers; write it like 0.1,0.25,1"
        ) from None
