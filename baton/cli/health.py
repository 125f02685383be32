"""`baton health`: the probe of containers."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def health(
    address: Annotated[str, typer.Argument(help="host:port of a router or a node.")],
    timeout: Annotated[float, typer.Option(min=0, help="How many seconds to wait.")] = 3.0,
) -> None:
    """Ask a server whether it can serve: exit code 0 if so, 1 if not or nobody answers."""
    import grpc

    from baton.health import ask

    with grpc.insecure_channel(address) as channel:
        verdict = ask(channel, address, timeout)
    print(verdict.words, file=sys.stdout if verdict.is_serving else sys.stderr)
    if not verdict.is_serving:
        raise typer.Exit(1)
