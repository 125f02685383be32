"""How the commands that talk to a router reach it: options for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import NETWORK_PANEL

if TYPE_CHECKING:
    from baton.client import Client

Address = Annotated[
    str, typer.Option(help="host:port of the router.", rich_help_panel=NETWORK_PANEL)
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0.001,
        help="Seconds that an answer may take.",
        rich_help_panel=NETWORK_PANEL,
    ),
]


def connect(address: Address = "127.0.0.1:50051", timeout_s: Timeout = None) -> Client:
    from baton.client import Client

    return Client(address, timeout_s=timeout_s)
