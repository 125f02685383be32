"""Command line that sends a first request to the HTTP APIs of a cluster."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from baton.rpc.security.tls import TlsConfig


class FirstRequest(NamedTuple):
    """Request that a model can serve."""

    path: str
    body: Mapping[str, Any]


MESSAGE = {"role": "user", "content": "Hello"}
CHAT = FirstRequest("chat/completions", {"messages": [MESSAGE], "max_tokens": 100})
COMPLETION = FirstRequest("completions", {"prompt": "Hello", "max_tokens": 100})
EMBEDDING = FirstRequest("embeddings", {"input": "Hello"})
SCORE = FirstRequest("score", {"text_1": "Hello", "text_2": "Good morning"})


def first_request(*, generates: bool, num_labels: int, has_chat_template: bool) -> FirstRequest:
    if generates:
        return CHAT if has_chat_template else COMPLETION
    return SCORE if num_labels == 1 else EMBEDDING


def curl_example(
    address: str, tls: TlsConfig, token_file: Path | None, request: FirstRequest
) -> str:
    """Return a command line for a POSIX shell."""
    scheme = "https" if tls.listens else "http"
    words = (
        f"curl {scheme}://{address}/v1/{request.path}",
        *_credentials(tls, token_file),
        "-H 'content-type: application/json'",
        f"-d '{json.dumps(request.body)}'",
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
