"""`baton bench`: measured figures, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from engine.errors import InvalidConfig

bench = typer.Typer(help="Measure, and print what was measured.", no_args_is_help=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures here, too.")]


@bench.command()
def scheduler(
    running: Annotated[str, typer.Option(help="Batch sizes.")] = "256,1024",
    waiting: Annotated[int, typer.Option(help="Length of the waiting queue.")] = 10_000,
    contexts: Annotated[str, typer.Option(help="Context lengths.")] = "128,8192",
    json_file: JsonFile = None,
) -> None:
    """What a step of the scheduler costs: µs per decoding request."""
    from baton.bench.scheduler import run

    figures = run(_numbers(running), waiting, _numbers(contexts))
    rows = [row for rows in figures.values() for row in rows]
    _show("one schedule and one update, medians", rows)
    _write(json_file, figures)


@bench.command()
def engine(
    model: Annotated[
        str, typer.Option(help="Model folder, or a name on the Hugging Face hub.")
    ] = "models/demo",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads of torch.")] = None,
    prompts: Annotated[str, typer.Option(help="Prompt lengths, for prefill.")] = "128,512",
    batches: Annotated[str, typer.Option(help="Batch sizes, for decode.")] = "1,4,16,32",
    steps: Annotated[int, typer.Option(help="Decode steps in one run.")] = 16,
    runs: Annotated[int, typer.Option(help="Runs of each setting; medians are shown.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """How many tokens per second the engine reads and writes."""
    from baton.bench.engine import EngineBench, Rate, run

    what = EngineBench(model, dtype, threads, _numbers(prompts), _numbers(batches), steps, runs)
    with Console(stderr=True).status("measuring") as status:

        def on_rate(rate: Rate) -> None:
            status.update(f"{rate.phase} {rate.size}: {rate.median_tokens_per_s:.1f} tokens/s")

        rates = [asdict(rate) for rate in run(what, on_rate)]
    _show(f"{model}, medians of {runs} runs", rates)
    _write(json_file, {"model": model, "rates": rates})


def _numbers(written: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(one) for one in written.split(","))
    except ValueError:
        raise InvalidConfig(f"{written!r} is no list of numbers; write it like 1,4,16") from None
    if min(numbers) < 1:
        raise InvalidConfig(f"{written!r}: every number must be at least 1")
    return numbers


def _show(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right", overflow="fold")
    for row in rows:
        table.add_row(
            *(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row.values())
        )
    Console().print(table)


def _write(path: Path | None, figures: object) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
