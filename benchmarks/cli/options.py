"""`python -m benchmarks options`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json


def options(
    added: Annotated[
        str, typer.Option("--with", help="Options of the nodes to measure the effect of.")
    ] = "--async-scheduling",
    model: Annotated[str, typer.Option(help="Model folder.")] = "models/demo",
    nodes: Annotated[
        str, typer.Option(help="Options of the nodes of both clusters.")
    ] = "--kv-cache-memory 128MiB --threads 1",
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 16,
    requests: Annotated[int, typer.Option(min=3, help="Requests per round.")] = 40,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    answer: Annotated[int, typer.Option(min=3, help="Tokens of an answer.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each cluster.")] = 15,
    json_file: JsonFile = None,
) -> None:
    """Compare a prefill and a decode node with and without some options, alternately."""
    from benchmarks.cluster.node_options import run
    from benchmarks.cluster.rounds import RoundsBench

    bench = RoundsBench(
        model,
        num_streams=streams,
        num_requests=requests,
        prompt_tokens=prompt,
        answer_tokens=answer,
        num_rounds=rounds,
        node_arguments=tuple(shlex.split(nodes)),
    )
    with Console(stderr=True).status("starting two clusters") as status:

        def on_round(name: str, tokens_per_s: float) -> None:
            status.update(f"{name}: {tokens_per_s:.0f} tokens/s")

        figures = [asdict(each) for each in run(bench, tuple(shlex.split(added)), on_round)]
    show_table(f"{streams} streams, {rounds} rounds of {requests} requests", figures)
    write_json(json_file, {"what": asdict(bench), "figures": figures})
