"""TLS and token options of every command that opens a channel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.signatures import inherit_options
from baton.core.options import SECURITY, build_config
from baton.rpc.security.tls import TlsConfig

ClientTokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the token to send, in its first line.", rich_help_panel=SECURITY),
]


@inherit_options(TlsConfig, without=("tls_client_ca",))
def client_tls(**given: Any) -> TlsConfig:
    """TLS settings of a process that is only a client. Raises InvalidConfig."""
    return build_config(TlsConfig, given)
