"""How the commands that talk to a router reach it: options for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.options import NETWORK_PANEL
from baton.cli.security import ClientTokenFile, client_tls
from baton.cli.signatures import takes_options_of

if TYPE_CHECKING:
    from baton.client import AsyncClient

Address = Annotated[
    str,
    typer.Option(
        help="host:port of the router (gRPC); 50051 if the port is left out.",
        rich_help_panel=NETWORK_PANEL,
    ),
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


@takes_options_of(client_tls)
def connect(
    address: Address = "127.0.0.1:50051",
    timeout_s: Timeout = None,
    token_file: ClientTokenFile = None,
    **given: Any,
) -> AsyncClient:
    """Not a blocking client: Ctrl-C inside of its calls can leave gRPC's locks in disorder."""
    from baton.client import AsyncClient
    from serving.token import read_tokens

    token = None if token_file is None else read_tokens(token_file)[0]
    return AsyncClient(address, timeout_s=timeout_s, tls=client_tls(**given), token=token)
