"""TLS and token options of every command that opens or serves a channel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from baton.rpc.security.tls import TlsConfig
    from baton.rpc.security.token import AcceptedTokens

SECURITY_PANEL = "Security"


def _option(help: str) -> Any:  # noqa: A002
    return typer.Option(help=help, rich_help_panel=SECURITY_PANEL)


TlsCert = Annotated[Path | None, _option("PEM file: certificate of this process.")]
TlsKey = Annotated[Path | None, _option("PEM file: private key of --tls-cert.")]
TlsCa = Annotated[
    Path | None, _option("PEM file: trusted authorities; enables TLS for outgoing connections.")
]
TlsClientCa = Annotated[
    Path | None, _option("PEM file: authorities of client certificates; enables mutual TLS.")
]
TlsServerName = Annotated[
    str, _option("Server name to expect in certificates, if it is not the host.")
]
RouterTokenFile = Annotated[Path | None, _option("File of accepted client tokens, one per line.")]
ClientTokenFile = Annotated[Path | None, _option("File with the token to send, in its first line.")]
OperatorTokenFile = Annotated[
    Path | None,
    _option(
        "File of operators' tokens, one per line, which resets and drains require. Router and "
        "nodes need the same file to reset tiers that nodes share."
    ),
]


def operator_tokens(path: Path | None) -> AcceptedTokens | None:
    """Raises InvalidConfig."""
    from baton.rpc.security.operators import OPTION
    from baton.rpc.security.token import AcceptedTokens, read_tokens

    return None if path is None else AcceptedTokens(read_tokens(path, OPTION))


def tls_config(
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_client_ca: TlsClientCa = None,
    tls_server_name: TlsServerName = "",
) -> TlsConfig:
    """TLS settings of a server process. Raises InvalidConfig."""
    from baton.rpc.security.tls import TlsConfig

    return TlsConfig(tls_cert, tls_key, tls_ca, tls_client_ca, tls_server_name)


def client_tls(
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = "",
) -> TlsConfig:
    """TLS settings of a process that is only a client. Raises InvalidConfig."""
    return tls_config(tls_cert, tls_key, tls_ca, tls_server_name=tls_server_name)
