"""Connection options of the commands that call a router, or another server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from baton.cli.signatures import inherit_options, make
from baton.core.options import NETWORK, SECURITY, Option, build_config
from baton.rpc.security.tls import TlsConfig
from baton.rpc.security.token import read_operator_tokens, read_tokens

if TYPE_CHECKING:
    from baton.bench.running import Connect
    from baton.client import AsyncClient

Result = TypeVar("Result")

ClientTokenFile = Annotated[
    Path | None, Option("File with the token to send, in its first line.", SECURITY)
]
OperatorTokenFile = Annotated[
    Path | None,
    Option(
        "File with an operator's token in its first line, as the cluster's router and nodes have "
        "it.",
        SECURITY,
    ),
]


@inherit_options(TlsConfig, without=("tls_client_ca",))
def client_tls(**given: Any) -> TlsConfig:
    """TLS settings of a process that is only a client. Raises InvalidConfig."""
    return build_config(TlsConfig, given)


@inherit_options(client_tls)
def connect(
    address: Annotated[
        str, Option("host:port of the router (gRPC). Default port: 50051.", NETWORK)
    ] = "127.0.0.1:50051",
    timeout_s: Annotated[
        float | None,
        Option("Timeout of a request in seconds.", NETWORK, flags=("--timeout",), at_least=0.001),
    ] = None,
    token_file: ClientTokenFile = None,
    **given: Any,
) -> AsyncClient:
    """Open an async client: Ctrl-C in a blocking gRPC call can leave its locks inconsistent."""
    from baton.client import AsyncClient

    tls, token = client_tls(**given), _token(token_file)
    return AsyncClient(address, timeout_s=timeout_s, tls=tls, token=token)


def call_router(given: dict[str, Any], call: Callable[[AsyncClient], Awaitable[Result]]) -> Result:
    """Return the result of a call with a client that `connect` opens. Ctrl-C ends it."""
    from baton.cli.event_loop import run_interruptibly

    async def run() -> Result:
        async with make(connect, given) as client:
            return await call(client)

    return run_interruptibly(run())


@inherit_options(client_tls)
def connect_to_measure(token_file: ClientTokenFile = None, **given: Any) -> Connect:
    """Return a factory of clients that do not retry: failures are part of the measurement."""
    from baton.client import AsyncClient, Retries

    tls, token = client_tls(**given), _token(token_file)
    retries = Retries(max_attempts=1)
    return lambda address: AsyncClient(address, tls=tls, token=token, retries=retries)


def _token(file: Path | None) -> str | None:
    return None if file is None else read_tokens(file)[0]


def operator_token(file: Path | None) -> str | None:
    """Return the token to send. Raises InvalidConfig."""
    operators = read_operator_tokens(file)
    return None if operators is None else operators.tokens[0]
