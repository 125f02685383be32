"""Client of a vLLM server's HTTP API. Closing a connection early cancels its request there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.foreign_kv import ForeignKv, foreign_kv_from
from baton.router.discovery.sources import VLLM, join_address

MAX_REPLY_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 16
ERROR_CHARACTERS = 200
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
COMPLETIONS = "/v1/completions"
# Of a request that no server of this model would take, such as one of too many tokens.
REFUSALS = frozenset({b"400", b"413", b"422"})


class ServerFailed(Exception):
    """A vLLM server has not answered as expected."""


class RequestRefused(ServerFailed):
    """A vLLM server works, but has refused this request."""


@dataclass(frozen=True, slots=True)
class VllmApi:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{VLLM}//{join_address(self.host, self.port)}"

    async def get(self, path: str) -> Mapping[str, Any]:
        """Return the JSON object at a path. Raises ServerFailed and OSError, as do the others."""
        return _json_object(await self._exchange("GET", path))

    async def get_text(self, path: str) -> str:
        return (await self._exchange("GET", path)).decode(errors="replace")

    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Mapping[str, Any]:
        content = json.dumps(body).encode()
        return _json_object(await self._exchange("POST", path, content, headers))

    async def _exchange(
        self, method: str, path: str, content: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=MAX_LINE_BYTES)
        try:
            # Replies to HTTP/1.0 are not chunked, and end with the connection.
            fields = {
                "Host": join_address(self.host, self.port),
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                **(headers or {}),
            }
            lines = [f"{method} {path} HTTP/1.0", *(f"{key}: {fields[key]}" for key in fields)]
            writer.write("\r\n".join([*lines, "", ""]).encode() + content)
            await writer.drain()
            return await _read_reply(reader)
        finally:
            writer.close()


async def _read_reply(reader: asyncio.StreamReader) -> bytes:
    """Return the content of a reply with status 200."""
    try:
        status = (await reader.readline()).split()
        length = None
        while (line := (await reader.readline()).strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
    except ValueError as error:
        raise ServerFailed(f"its reply cannot be read: {error}") from None
    content = bytearray()
    while part := await reader.read(MAX_LINE_BYTES):
        content += part
        if len(content) > MAX_REPLY_BYTES:
            raise ServerFailed(f"its reply has more than {MAX_REPLY_BYTES} bytes")
    if length is not None and len(content) != length:
        raise ServerFailed(f"its reply has {len(content)} of {length} bytes")
    if status[1:2] != [b"200"]:
        given = b" ".join(status[1:2]).decode(errors="replace") or "missing"
        text = bytes(content[:ERROR_CHARACTERS]).decode(errors="replace")
        is_refusal = not REFUSALS.isdisjoint(status[1:2])
        raise (RequestRefused if is_refusal else ServerFailed)(f"status {given}: {text}")
    return bytes(content)


def _json_object(content: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ServerFailed(f"its reply cannot be read: {error}") from None
    if not isinstance(answer, dict):
        raise ServerFailed("its reply is no JSON object")
    return answer


async def ask(
    api: VllmApi,
    model: str,
    token_ids: Sequence[int],
    headers: Mapping[str, str] = {},
    **more: object,
) -> Mapping[str, Any]:
    """Have a server compute a prompt and hold its KV. Raises ServerFailed and OSError."""
    body = {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "kv_transfer_params": ASK,
        **more,
    }
    return await api.post(COMPLETIONS, body, headers)


def kv_of(answer: Mapping[str, Any]) -> ForeignKv:
    """Return the KV that an answer names. Raises ServerFailed."""
    try:
        params = answer.get("kv_transfer_params")
        kv = foreign_kv_from(params) if isinstance(params, dict) else None
    except InvalidRequest as error:
        raise ServerFailed(str(error)) from None
    if kv is None:
        raise ServerFailed("its answer names no KV; start it with NixlConnector")
    return kv
