"""`baton bench interference`."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import JsonFile
from baton.cli.show import console, show_table

if TYPE_CHECKING:
    from baton.bench.interference import Row, Start

OWN = "default"


def interference(
    model: Annotated[str, typer.Option(help="Model folder; all engines read the same.")],
    vllm_venv: Annotated[
        Path | None, typer.Option(help="Environment that vLLM (for the CPU) is installed in.")
    ] = None,
    vllm_chunks: Annotated[
        str, typer.Option(help="Most tokens of its steps; default: its own choice; empty: none.")
    ] = f"{OWN},64,128,256",
    vllm_apart: Annotated[
        bool, typer.Option("--vllm-apart", help="Its prefill and decode servers over NIXL, too.")
    ] = False,
    streams: Annotated[int, typer.Option(help="Answers that go on all the time.")] = 4,
    prompts: Annotated[int, typer.Option(help="That arrive in a round.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of each.")] = 512,
    every: Annotated[float, typer.Option(help="Seconds from one to the next.")] = 5.0,
    rounds: Annotated[int, typer.Option(help="Medians of so many are shown.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this PNG, too.")] = None,
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
    if plot is not None:
        need_matplotlib()
    with console(stderr=True).status("round 1") as status:

        def on_round(name: str, number: int, found: Figures) -> None:
            status.update(f"round {number + 1}, {name}: ITL p99 {found.itl_p99_ms:.0f} ms")

        rows = run(what, _engines(model, vllm_venv, vllm_chunks, vllm_apart), on_round)
    title = f"{streams} streams, {prompt} tokens every {every:g} s, medians of {rounds} rounds"
    show_table(title, [_flat(row) for row in rows])
    if plot is not None:
        draw(what, rows, plot)
    if json_file is not None:
        told = {"what": asdict(what), "engines": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _engines(model: str, venv: Path | None, chunks: str, is_apart: bool) -> dict[str, Start]:
    from baton.bench import engines
    from baton.cli.bench import numbers

    found: dict[str, Start] = {
        "baton, prefill and decode": partial(engines.baton_apart, model),
        "baton, colocated": partial(engines.baton_colocated, model),
    }
    if venv is None:
        return found
    for chunk in filter(None, chunks.split(",")):
        limit = None if chunk == OWN else numbers(chunk)[0]
        name = f"vllm, colocated, steps of {chunk}"
        found[name] = partial(engines.vllm_colocated, model, venv, limit)
    if is_apart:
        found["vllm, prefill and decode"] = partial(engines.vllm_apart, model, venv)
    return found


def _flat(row: Row) -> dict[str, object]:
    told: dict[str, object] = asdict(row)
    figures = told.pop("figures")
    return {"engine": told.pop("engine"), **figures, **told}  # type: ignore[dict-item]
