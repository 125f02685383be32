"""`python -m benchmarks pictures`."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json


def pictures(
    model: Annotated[
        str, typer.Option(help="Model folder of Idefics3, for its text part and tokenizer.")
    ] = "models/demo-vision",
    streams: Annotated[int, typer.Option(min=1, help="Text streams.")] = 2,
    window: Annotated[float, typer.Option(help="Seconds with pictures, and without.")] = 60.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 3,
    per_minute: Annotated[float, typer.Option(min=1, help="Pictures a minute.")] = 4.0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a chat about one picture.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """Measure what pictures cost others on a prefill and a decode node.

    Shows the gaps between tokens of text streams while pictures are sent, and while none are; the
    memory of the decode node next to one of the text part alone; and the encodings of a picture
    that a chat sends in each turn. The tower has the size of SmolVLM-256M's, and random weights.
    """
    from benchmarks.cluster.pictures import PicturesBench, run

    bench = PicturesBench(model, streams, window, rounds, per_minute, turns)
    with tempfile.TemporaryDirectory() as folder:
        rows = [asdict(figure) for figure in asyncio.run(run(bench, Path(folder)))]
    show_table("pictures", rows)
    write_json(json_file, rows)
