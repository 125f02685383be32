"""`python -m benchmarks chart`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options.output import check_writable_file
from baton.core.errors import InvalidConfig


def chart(
    picture: Annotated[
        Path, typer.Argument(help="PNG file to draw.", callback=check_writable_file)
    ],
    peer: Annotated[
        list[Path] | None,
        typer.Option(help="Output of `python -m benchmarks peer --json`; may be repeated."),
    ] = None,
    interference: Annotated[
        list[Path] | None,
        typer.Option(
            help="Output of `python -m benchmarks interference --json`; may be repeated. An "
            "engine that is in several files is drawn from the first."
        ),
    ] = None,
) -> None:
    """Draw results of the peer and interference benchmarks as bars, gaps on a log axis."""
    from benchmarks.plots.chart import draw, first_row_per_engine, read_interference, read_peer

    if not peer and not interference:
        raise InvalidConfig("nothing to draw: pass --peer, --interference or both")
    peers = [read_peer(path) for path in peer or ()]
    rows = [row for path in interference or () for row in read_interference(path)]
    draw(peers, first_row_per_engine(rows), picture)
    print(picture)
