"""Command line that sends a first request to the HTTP APIs of a cluster."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from baton.rpc.security.tls import TlsConfig

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100}
COMPLETION = {"prompt": "Hello", "max_tokens": 100}


def curl_example(
    address: str, tls: TlsConfig, token_file: Path | None, *, has_chat_template: bool
) -> str:
    """Return a command line for a POSIX shell."""
    path, body = ("chat/completions", CHAT) if has_chat_template else ("completions", COMPLETION)
    scheme = "https" if tls.listens else "http"
    words = (
        f"curl {scheme}://{address}/v1/{path}",
        *_credentials(tls, token_file),
        "-H 'content-type: application/json'",
        f"-d '{json.dumps(body)}'",
    )
    return " ".join(words)


def _credentials(tls: TlsConfig, token_file: Path | None) -> Iterator[str]:
    """Yield curl's options for this cluster's authorities, certificates and tokens."""
    if tls.listens and tls.ca is not None:
        yield f"--cacert {_quoted(tls.ca)}"
    if tls.client_ca is not None and tls.cert is not None and tls.key is not None:
        yield f"--cert {_quoted(tls.cert)} --key {_quoted(tls.key)}"
    if token_file is not None:
        token = f"awk 'NF {{ print $1; exit }}' {_quoted(token_file)}"
        yield f'-H "authorization: Bearer $({token})"'


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
