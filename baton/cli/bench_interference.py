"""`baton bench interference`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.bench_engines import (
    OWN,
    BenchModel,
    VllmApart,
    VllmChunks,
    VllmVenv,
    announced,
    chosen_engines,
    that_stay,
)
from baton.cli.options import JsonFile, can_be_written
from baton.cli.show import console, show_table

if TYPE_CHECKING:
    from baton.bench.interference import Row


def interference(
    model: BenchModel,
    vllm_venv: VllmVenv = None,
    vllm_chunks: VllmChunks = f"{OWN},64,128,256",
    vllm_apart: VllmApart = "",
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Start vLLM's servers once and freeze them between their turns. Each keeps its "
            "memory to the end: four times the weights and more.",
        ),
    ] = False,
    streams: Annotated[int, typer.Option(help="Answers that go on all the time.")] = 4,
    prompts: Annotated[int, typer.Option(help="That arrive in a round.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of each.")] = 512,
    every: Annotated[float, typer.Option(help="Seconds from one to the next.")] = 5.0,
    rounds: Annotated[int, typer.Option(help="Medians of so many are shown.")] = 3,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it into this PNG, too.", callback=can_be_written)
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """What long prompts do to the answers that are under way: Baton, colocated or not, and vLLM.

    Each engine in turns on the same cores, under the same clients over HTTP. Ratios say how many
    times the figure of Baton's prefill and decode nodes the other engine has.
    """
    from baton.bench.interference import Figures, Interference, run
    from baton.bench.interference_plot import draw
    from baton.bench.plotting import need_matplotlib

    what = Interference(
        num_streams=streams,
        num_prompts=prompts,
        prompt_tokens=prompt,
        every_s=every,
        num_rounds=rounds,
    )
    engines = chosen_engines(model, vllm_venv, vllm_chunks, vllm_apart)
    if plot is not None:
        need_matplotlib()
    screen = console(stderr=True)
    with screen.status("starting") as status, ExitStack() as lifetime:

        def on_round(name: str, number: int, found: Figures) -> None:
            screen.print(f"round {number + 1}, {name}: ITL p99 {found.itl_p99_ms:.0f} ms")

        started = that_stay(engines, lifetime) if keep else engines
        rows = run(what, announced(started, status.update), on_round)
    title = f"{streams} streams, {prompt} tokens every {every:g} s, medians of {rounds} rounds"
    show_table(title, [_flat(row) for row in rows])
    if plot is not None:
        draw(what, rows, plot)
    if json_file is not None:
        told = {"what": asdict(what), "engines": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _flat(row: Row) -> dict[str, object]:
    told: dict[str, object] = asdict(row)
    figures = told.pop("figures")
    return {"engine": told.pop("engine"), **figures, **told}  # type: ignore[dict-item]
