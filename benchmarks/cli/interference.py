"""`python -m benchmarks interference`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json
from benchmarks.partial_results import report_on_exit
from benchmarks.peers.engine_options import (
    OWN,
    BatonSteps,
    BenchDevice,
    BenchKernels,
    BenchModel,
    PlotFile,
    VllmApart,
    VllmChunks,
    VllmVenv,
    announced,
    chosen_engines,
    keep_engines_warm,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.interference import FigureRow, Interference, Turn
    from benchmarks.peers.warm_engines import Start


def interference(
    model: BenchModel,
    device: BenchDevice = "cpu",
    kernels: BenchKernels = "auto",
    baton_steps: BatonSteps = OWN,
    vllm_venv: VllmVenv = None,
    vllm_chunks: VllmChunks = f"{OWN},64,128,256",
    vllm_apart: VllmApart = "",
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Start vLLM's servers once and freeze them between turns. Each keeps its memory "
            "until the end: more than four times the weights.",
        ),
    ] = False,
    streams: Annotated[int, typer.Option(help="Number of continuous streams.")] = 4,
    prompts: Annotated[int, typer.Option(help="Long prompts that arrive in a round.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of a long prompt.")] = 512,
    every: Annotated[float, typer.Option(help="Seconds between long prompts.")] = 5.0,
    rounds: Annotated[int, typer.Option(help="Number of rounds; medians are shown.")] = 3,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Measure how long prompts disturb running streams: Baton, colocated or not, and vLLM.

    The engines alternate on the same cores under the same load over HTTP. A ratio is the figure of
    an engine divided by that of Baton's prefill and decode nodes.
    """
    from baton.bench.plots import need_matplotlib
    from benchmarks.peers.interference import Interference

    bench = Interference(
        num_streams=streams,
        num_prompts=prompts,
        prompt_tokens=prompt,
        every_s=every,
        num_rounds=rounds,
    )
    engines = chosen_engines(
        model, baton_steps, vllm_venv, vllm_chunks, vllm_apart, device, kernels
    )
    if plot is not None:
        need_matplotlib()
    with ExitStack() as lifetime:
        measure(
            bench, keep_engines_warm(engines, model, lifetime) if keep else engines, plot, json_file
        )


def measure(
    bench: Interference, engines: dict[str, Start], plot: Path | None, json_file: Path | None
) -> None:
    """Run the rounds and report the results, also partial ones after an interruption."""
    from benchmarks.peers.interference import run

    turns: list[Turn] = []

    def report(is_whole: bool) -> None:
        _report(bench, turns, is_whole, plot, json_file)

    with report_on_exit(turns, report), console(stderr=True).status("starting") as status:

        def on_turn(turn: Turn) -> None:
            turns.append(turn)
            figure = f"ITL p99 {turn.figures.itl_p99_ms:.0f} ms"
            status.console.print(f"round {turn.round + 1}, {turn.engine}: {figure}")

        run(bench, announced(engines, status.update), on_turn)


def _report(
    bench: Interference,
    turns: Sequence[Turn],
    is_whole: bool,
    plot: Path | None,
    json_file: Path | None,
) -> None:
    from benchmarks.peers.interference import num_whole_rounds, rows_of
    from benchmarks.plots.interference import draw

    rows, rounds = rows_of(turns), num_whole_rounds(turns)
    values = {
        "what": asdict(bench),
        "is_whole": is_whole,
        "rounds": rounds,
        "engines": [asdict(row) for row in rows],
    }
    write_json(json_file, values)
    load = f"{bench.num_streams} streams, {bench.prompt_tokens} tokens every {bench.every_s:g} s"
    show_table(f"{load}, medians of {rounds} rounds", [_flat(row) for row in rows])
    if plot is not None:
        draw(bench, rows, plot)


def _flat(row: FigureRow) -> dict[str, object]:
    values: dict[str, object] = asdict(row)
    figures = values.pop("figures")
    return {"engine": values.pop("engine"), **figures, **values}  # type: ignore[dict-item]
