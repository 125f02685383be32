"""`python -m benchmarks router`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json


def router(
    model: Annotated[
        str, typer.Option(help="Model whose tokenizer the router uses; empty: none.")
    ] = "models/demo",
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 64,
    answer: Annotated[int, typer.Option(min=3, help="Tokens of an answer.")] = 128,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    interval_ms: Annotated[
        float, typer.Option(min=0, help="Milliseconds between the tokens of a stream; 0: no delay.")
    ] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; medians are shown.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure the router's CPU time per token and per request, and the latency it adds.

    The nodes compute nothing; their RPCs, messages and sockets are real. A bare gRPC server is
    measured in alternation with the router as the lower bound of the cost per token.
    """
    from benchmarks.router.cpu_time import Round, RouterBench, run

    bench = RouterBench(
        model=model,
        num_streams=streams,
        answer_tokens=answer,
        prompt_tokens=prompt,
        interval_ms=interval_ms,
        num_rounds=rounds,
    )
    with Console(stderr=True).status("starting") as status:

        def on_round(one: Round) -> None:
            bare = f"{one.bare_us_per_token:.0f} in a bare server"
            status.update(f"{one.cpu_us_per_token:.0f} µs per token, {bare}")

        figures = [asdict(figure) for figure in run(bench, on_round)]
    show_table(f"{streams} streams, medians of {rounds} rounds", figures)
    write_json(json_file, {"what": asdict(bench), "figures": figures})
