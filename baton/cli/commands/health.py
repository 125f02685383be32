"""`baton health`: health probe for containers."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from baton.cli.options.connection import client_tls
from baton.cli.signatures import inherit_options
from baton.core.options import Option


@inherit_options(client_tls)
def health(
    address: Annotated[str, typer.Argument(help="host:port of a router or a node.")],
    timeout: Annotated[float, Option("Timeout in seconds.", at_least=0)] = 3.0,
    live: Annotated[
        bool, Option("Check liveness only: whether the process needs a restart.", flags=("--live",))
    ] = False,
    **for_tls: Any,
) -> None:
    """Check the health of a server: exit code 0 if it serves, 1 if not or if it does not answer."""
    from baton.cli.health_check import ask
    from baton.rpc.health import LIVENESS

    verdict = ask(address, timeout, client_tls(**for_tls), LIVENESS if live else "")
    print(verdict.words, file=sys.stdout if verdict.is_serving else sys.stderr)
    if not verdict.is_serving:
        raise typer.Exit(1)
