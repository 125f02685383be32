"""`baton bench chart`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import can_be_written
from engine.errors import InvalidConfig


def chart(
    picture: Annotated[Path, typer.Argument(help="The PNG to draw.", callback=can_be_written)],
    peer: Annotated[
        list[Path] | None, typer.Option(help="From `baton bench peer --json`; may be repeated.")
    ] = None,
    interference: Annotated[
        Path | None, typer.Option(help="From `baton bench interference --json`.")
    ] = None,
) -> None:
    """Draw what other benches measured beside other engines: bars, and gaps on a log axis."""
    from baton.bench.chart import draw, read_interference, read_peer

    if not peer and interference is None:
        raise InvalidConfig("nothing to draw: give --peer, --interference or both")
    peers = [read_peer(path) for path in peer or ()]
    rows = [] if interference is None else read_interference(interference)
    draw(peers, rows, picture)
    print(picture)
