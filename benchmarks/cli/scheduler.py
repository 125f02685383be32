"""`python -m benchmarks scheduler`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json
from benchmarks.cli.lists import parse_numbers


def scheduler(
    running: Annotated[str, typer.Option(help="Batch sizes.")] = "256,1024",
    waiting: Annotated[int, typer.Option(help="Length of the waiting queue.")] = 10_000,
    contexts: Annotated[str, typer.Option(help="Context lengths.")] = "128,8192",
    kv_events: Annotated[
        bool, typer.Option("--kv-events", help="Collect KV events with their tokens.")
    ] = False,
    pass_ms: Annotated[
        float, typer.Option(min=0.0, help="Duration of a pass, to measure the gaps between passes.")
    ] = 10.0,
    json_file: JsonFile = None,
) -> None:
    """Measure a scheduler step in µs per decoding request, and gaps between passes."""
    from benchmarks.engine import pass_gaps
    from benchmarks.engine.scheduler import run

    figures = run(parse_numbers(running), waiting, parse_numbers(contexts), kv_events=kv_events)
    rows = [row for rows in figures.values() for row in rows]
    show_table("one schedule and one update, medians", rows)
    gaps = [asdict(each) for each in pass_gaps.run(parse_numbers(running), pass_ms / 1e3)]
    show_table("gaps between the passes of a device, medians", gaps)
    write_json(json_file, {**figures, "pass_gaps": gaps})
