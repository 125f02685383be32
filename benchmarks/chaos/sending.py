"""How a chaos run sends a request of any kind, and how a request fails."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Protocol

from baton.client import AsyncClient, Served
from baton.core.errors import NamedError

EMBEDDER = "vectors"  # name of the further model, which embeds
UNREACHABLE, DEADLINE_EXCEEDED = "UNREACHABLE", "DEADLINE_EXCEEDED"


class WrongAnswer(NamedError):
    """An answer that contradicts itself."""


class HttpRequestFailed(NamedError):
    """The router refused or failed a request, or could not be reached."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _ignore_tokens() -> None:
    """Ignore the arrival of tokens."""


@dataclass(frozen=True, slots=True)
class Router:
    """Addresses of the router under test, and the names of its models."""

    client: AsyncClient
    http_address: str
    chat_model: str = ""


@dataclass(frozen=True, slots=True)
class Sending:
    """Circumstances in which a request is sent."""

    router: Router
    timeout_s: float | None = None
    salt: str = ""  # requests of another salt share no cached KV
    on_tokens: Callable[[], None] = _ignore_tokens  # called when tokens arrive

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        """Post JSON to the HTTP API and return that of the answer. Raises HttpRequestFailed."""
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await _post(self.router.http_address, path, json.dumps(body).encode())
        except TimeoutError as error:
            raise HttpRequestFailed(DEADLINE_EXCEEDED) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise HttpRequestFailed(UNREACHABLE) from error
        if "error" in response:
            raise HttpRequestFailed(response["error"]["reason"])
        return response


class ChaosRequest(Protocol):
    """Request of one kind. Its content has its tag, so that answers cannot be confused."""

    @property
    def tag(self) -> int: ...

    @property
    def kind(self) -> str: ...

    async def send(self, sending: Sending) -> Any:
        """Return the answer. Raises BatonError, HttpRequestFailed and WrongAnswer."""
        ...

    def refined(self, answer: Any) -> ChaosRequest:
        """Return the request to use, given the answer to this one."""
        ...

    def difference(self, answer: Any, expected: Any) -> str | None:
        """Return the difference to the expected answer, or None."""
        ...

    def served(self, answer: Any) -> Served | None:
        """Return the way in which the answer was served, if it is reported."""
        ...


async def _post(address: str, path: str, payload: bytes) -> Any:
    """Post on a connection of its own, which a cancelled client closes."""
    host, _, port = address.rpartition(":")
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, int(port))
    with closing(writer):
        writer.write(head.encode() + payload)
        return json.loads(_body_of(await reader.read()))


def _body_of(received: bytes) -> bytes:
    """Return the body of a whole response. Raises HTTPException if it is not whole."""
    response = http.client.HTTPResponse(_Received(received))  # type: ignore[arg-type]
    response.begin()
    return response.read()


@dataclass(frozen=True, slots=True)
class _Received:
    """Socket from which everything has been received."""

    content: bytes

    def makefile(self, _mode: str) -> BytesIO:
        return BytesIO(self.content)
