"""vLLM servers that compute prompts for decode nodes, over vLLM's HTTP API.

Failures cost time, and then the decode node computes the prompt: nothing raises.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.foreign_kv import ForeignKv, foreign_kv_from

log = logging.getLogger(__name__)

MIN_TOKENS = 64  # of a prompt; shorter ones are computed sooner than asked for
AVOID_S = 10.0  # a server that has failed
PREFILL_S = 120.0
MAX_REPLY_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 16
ASK = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True, slots=True)
class ComputedKv:
    """KV of a prompt on a server."""

    kv: ForeignKv
    server: str
    answered_s: float  # when its lease had just begun

    def aged(self, now: float) -> ForeignKv:
        return replace(self.kv, age_s=now - self.answered_s)


class _Failed(Exception):
    """A server has not computed a prompt."""


@dataclass(slots=True)
class _Server:
    host: str
    port: int
    model: str = ""  # as it is served there; empty: not known yet
    num_tokens: int = 0  # of the prompts that it computes now
    avoided_until_s: float = float("-inf")

    def __str__(self) -> str:
        return f"vllm://{self.host}:{self.port}"


class VllmPrefills:
    def __init__(self, addresses: Sequence[tuple[str, int]], clock: Callable[[], float]) -> None:
        self._servers = [_Server(host, port) for host, port in addresses]
        self._clock = clock

    def __bool__(self) -> bool:
        return bool(self._servers)

    async def compute(
        self, token_ids: Sequence[int], timeout_s: float | None, traceparent: str = ""
    ) -> ComputedKv | None:
        """Let the least busy server compute a prompt. None: none has, within the time."""
        for server in sorted(self._servers, key=lambda each: each.num_tokens):
            if self._clock() < server.avoided_until_s:
                continue
            server.num_tokens += len(token_ids)
            try:
                async with asyncio.timeout(_earlier(PREFILL_S, timeout_s)):
                    return await self._compute_on(server, token_ids, traceparent)
            except (_Failed, OSError, TimeoutError) as error:
                log.warning("%s has not computed a prompt: %r", server, error)
                server.avoided_until_s = self._clock() + AVOID_S
                server.model = ""
            finally:
                server.num_tokens -= len(token_ids)
        return None

    async def _compute_on(
        self, server: _Server, token_ids: Sequence[int], traceparent: str
    ) -> ComputedKv:
        if not server.model:
            server.model = _only_model(await _request(server, "GET", "/v1/models"))
        body = {
            "model": server.model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
            "kv_transfer_params": ASK,
        }
        headers = {"traceparent": traceparent} if traceparent else {}
        answer = await _request(server, "POST", "/v1/completions", body, headers)
        began_s = self._clock()
        try:
            params = answer.get("kv_transfer_params")
            kv = foreign_kv_from(params if isinstance(params, dict) else None)
        except InvalidRequest as error:
            raise _Failed(str(error)) from None
        if kv is None:
            raise _Failed("its answer names no KV; start it with NixlConnector")
        return ComputedKv(kv, str(server), began_s)


def _only_model(answer: Mapping[str, Any]) -> str:
    models = answer.get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        raise _Failed("it lists no model")
    return str(models[0].get("id", ""))


def _earlier(limit_s: float, timeout_s: float | None) -> float:
    return limit_s if timeout_s is None else min(limit_s, timeout_s)


async def _request(
    server: _Server,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Mapping[str, Any]:
    """Return the JSON object of a reply. Closing the connection early cancels the request."""
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=MAX_LINE_BYTES)
    try:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {server.host}:{server.port}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        lines += [
            "Connection: close",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        await writer.drain()
        return await _read_reply(reader)
    finally:
        writer.close()


async def _read_reply(reader: asyncio.StreamReader) -> Mapping[str, Any]:
    try:
        status = (await reader.readline()).split()
        length = 0
        while (line := (await reader.readline()).strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if not 0 < length <= MAX_REPLY_BYTES:
            raise _Failed(f"its reply has {length} bytes")
        content = await reader.readexactly(length)
        if status[1:2] != [b"200"]:
            raise _Failed(f"status {status[1:2]}: {content[:200].decode(errors='replace')}")
        answer = json.loads(content)
    except (ValueError, RecursionError, asyncio.IncompleteReadError) as error:
        raise _Failed(f"its reply cannot be read: {error}") from None
    if not isinstance(answer, dict):
        raise _Failed("its reply is no JSON object")
    return answer
