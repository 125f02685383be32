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
        list[Path] | None,
        typer.Option(
            help="From `baton bench interference --json`; may be repeated: an engine that is in "
            "several is drawn from the first."
        ),
    ] = None,
) -> None:
    """Draw what other benches measured beside other engines: bars, and gaps on a log axis."""
    from baton.bench.chart import draw, once_each, read_interference, read_peer

    if not peer and not interference:
        raise InvalidConfig("nothing to draw: give --peer, --interference or both")
    peers = [read_peer(path) for path in peer or ()]
    rows = [row for path in interference or () for row in read_interference(path)]
    draw(peers, once_each(rows), picture)
    print(picture)
