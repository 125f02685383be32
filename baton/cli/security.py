"""How channels are secured: options of every command that opens one, with one meaning for all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from serving.tls import TlsConfig

SECURITY_PANEL = "Security"


def _option(help: str) -> Any:  # noqa: A002
    return typer.Option(help=help, rich_help_panel=SECURITY_PANEL)


TlsCert = Annotated[Path | None, _option("PEM file: the certificate by which it shows who it is.")]
TlsKey = Annotated[Path | None, _option("PEM file: the key of --tls-cert.")]
TlsCa = Annotated[
    Path | None, _option("PEM file: authorities it trusts; given, it dials others by TLS.")
]
TlsClientCa = Annotated[
    Path | None, _option("PEM file: whoever dials it must show a certificate of these authorities.")
]
TlsServerName = Annotated[
    str, _option("What the certificates of those it dials are for, if not for the host dialled.")
]
RouterTokenFile = Annotated[
    Path | None, _option("Clients must send a token of this file, which has one in each line.")
]
ClientTokenFile = Annotated[Path | None, _option("Send the first token of this file.")]


def tls_config(
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_client_ca: TlsClientCa = None,
    tls_server_name: TlsServerName = "",
) -> TlsConfig:
    """Of a process that listens. Raises InvalidConfig."""
    from serving.tls import TlsConfig

    return TlsConfig(tls_cert, tls_key, tls_ca, tls_client_ca, tls_server_name)


def client_tls(
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = "",
) -> TlsConfig:
    """Of a process that only dials. Raises InvalidConfig."""
    return tls_config(tls_cert, tls_key, tls_ca, tls_server_name=tls_server_name)
