"""`python -m benchmarks trace`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json


def trace(
    model: Annotated[str, typer.Option(help="Model folder.")] = "models/demo",
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 16,
    requests: Annotated[int, typer.Option(min=3, help="Requests per round.")] = 40,
    answer: Annotated[int, typer.Option(min=3, help="Tokens of an answer.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each trace ratio.")] = 15,
    json_file: JsonFile = None,
) -> None:
    """Measure the overhead of tracing at 0, 1 and 100 % of the requests, alternately."""
    from benchmarks.cluster.rounds import RoundsBench
    from benchmarks.cluster.tracing import run

    bench = RoundsBench(
        model, num_streams=streams, num_requests=requests, answer_tokens=answer, num_rounds=rounds
    )
    with Console(stderr=True).status("starting two clusters") as status:

        def on_round(name: str, tokens_per_s: float) -> None:
            status.update(f"{name}: {tokens_per_s:.0f} tokens/s")

        figures = [asdict(figure) for figure in run(bench, on_round)]
    show_table(f"{streams} streams, {rounds} rounds of {requests} requests", figures)
    write_json(json_file, {"what": asdict(bench), "figures": figures})
