"""`python -m benchmarks index`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json


def index(
    nodes: Annotated[int, typer.Option(min=1, max=4096, help="Number of nodes.")] = 512,
    names: Annotated[
        int, typer.Option(min=1000, help="Cached blocks of each node. 200,000 take 3 GB in all.")
    ] = 200_000,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of the prompt to match.")] = 500,
    json_file: JsonFile = None,
) -> None:
    """Measure the router's index of cached prefixes: memory, updates, matches."""
    from benchmarks.router.prefix_index import run

    figures = asdict(run(nodes, names, blocks))
    show_table("cached prefixes of all nodes", [figures])
    write_json(json_file, figures)
