"""TLS and token options of every command that opens a channel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from baton.cli.signatures import inherit_options
from baton.core.options import SECURITY, Option, build_config
from baton.rpc.security.tls import TlsConfig

ClientTokenFile = Annotated[
    Path | None, Option("File with the token to send, in its first line.", SECURITY)
]


@inherit_options(TlsConfig, without=("tls_client_ca",))
def client_tls(**given: Any) -> TlsConfig:
    """TLS settings of a process that is only a client. Raises InvalidConfig."""
    return build_config(TlsConfig, given)
