"""`python -m benchmarks scheduler`."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.options.lists import parse_numbers
from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json


def scheduler(
    running: Annotated[str, typer.Option(help="Batch sizes.")] = "256,1024",
    waiting: Annotated[int, typer.Option(help="Length of the waiting queue.")] = 10_000,
    contexts: Annotated[str, typer.Option(help="Context lengths.")] = "128,8192",
    kv_events: Annotated[
        bool, typer.Option("--kv-events", help="Collect KV events with their tokens.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the cost of a scheduler step in µs per decoding request."""
    from benchmarks.engine.scheduler import run

    figures = run(parse_numbers(running), waiting, parse_numbers(contexts), kv_events=kv_events)
    rows = [row for rows in figures.values() for row in rows]
    show_table("one schedule and one update, medians", rows)
    write_json(json_file, figures)
