"""`python -m benchmarks adapters`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options.model import Dtype, Quantize, Threads
from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json


def adapters(
    model: Annotated[str, typer.Option(help="Model folder.")] = "models/demo",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    threads: Threads = 1,
    batch: Annotated[int, typer.Option(min=2, help="Requests that decode.")] = 32,
    adapters: Annotated[int, typer.Option(min=1, help="Different adapters in a batch.")] = 8,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 33,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a run.")] = 8,
    runs: Annotated[int, typer.Option(min=1, help="Pairs of runs; medians are shown.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Measure decode steps with LoRA adapters and without, switching adapters, and loading them."""
    from benchmarks.engine.adapters import AdapterBench, run

    bench = AdapterBench(
        model,
        dtype=dtype,
        quantize=quantize,
        num_threads=threads,
        batch=batch,
        num_adapters=adapters,
        rank=rank,
        num_prompt_tokens=prompt,
        num_steps=steps,
        num_runs=runs,
    )
    with Console(stderr=True).status("loading") as status:
        cost, load = run(
            bench, lambda done, total: status.update(f"{done} of {total} pairs of runs")
        )
    show_table(f"{model}, CPU time of the engine's thread, medians", [asdict(cost)])
    show_table("Reading an adapter while a request decodes, wall time", [asdict(load)])
    write_json(json_file, {"model": model, "steps": asdict(cost), "load": asdict(load)})
