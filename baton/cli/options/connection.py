"""Connection options of the commands that call a router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.options.security import ClientTokenFile, client_tls
from baton.cli.signatures import inherit_options
from baton.core.options import NETWORK

if TYPE_CHECKING:
    from baton.client import AsyncClient

Address = Annotated[
    str,
    typer.Option(
        help="host:port of the router (gRPC). Default port: 50051.",
        rich_help_panel=NETWORK,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0.001,
        help="Timeout of a request in seconds.",
        rich_help_panel=NETWORK,
    ),
]


@inherit_options(client_tls)
def connect(
    address: Address = "127.0.0.1:50051",
    timeout_s: Timeout = None,
    token_file: ClientTokenFile = None,
    **given: Any,
) -> AsyncClient:
    """Open an async client: Ctrl-C in a blocking gRPC call can leave its locks inconsistent."""
    from baton.client import AsyncClient
    from baton.rpc.security.token import read_tokens

    token = None if token_file is None else read_tokens(token_file)[0]
    return AsyncClient(address, timeout_s=timeout_s, tls=client_tls(**given), token=token)
