"""`python -m benchmarks forms`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json


def forms(
    model: Annotated[str, typer.Option(help="Model folder, for its tokenizer.")] = "models/demo",
    runs: Annotated[int, typer.Option(min=1, help="Runs of each constraint.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 300,
    json_file: JsonFile = None,
) -> None:
    """Measure the cost of structured outputs: compilation, mask per token, mask application."""
    from benchmarks.engine.structured_output import FormBench, run

    with Console(stderr=True).status("compiling") as status:
        bench = FormBench(model, runs, tokens)
        costs, applied = run(bench, lambda done: status.update(f"measured {done}"))
    rows, steps = [asdict(cost) for cost in costs], [asdict(cost) for cost in applied]
    show_table(f"CPU time, {runs} runs of up to {tokens} tokens", rows)
    show_table("applying masks to a step's logits", steps)
    write_json(json_file, {"what": asdict(bench), "forms": rows, "applied": steps})
