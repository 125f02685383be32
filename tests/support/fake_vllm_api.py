"""HTTP API of a vLLM server, as far as the router uses it, with answers that tests choose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from baton.router.discovery.sources import VllmServer

HOST = "127.0.0.1"
PARAMS = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "engine",
    "remote_request_id": "cmpl-1",
    "remote_host": "vllm",
    "remote_port": 5600,
    "remote_num_tokens": 100,
}
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
"""

Answer = dict[str, Any] | bytes


class FakeApi:
    """Answers requests, and keeps the bodies of completions."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.answer: Answer | Callable[[dict[str, Any]], Answer] = {"kv_transfer_params": PARAMS}
        self.status = "200 OK"
        self.pages: dict[str, Answer] = {
            "/health": b"",
            "/metrics": METRICS.encode(),
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "served", "root": "/models/tiny"}]},
        }
        self.begins: asyncio.Event | None = None  # set when a prompt is being computed
        self.is_cancelled = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r")[0])
        content = await reader.readexactly(length)
        method, path, _ = head.split(maxsplit=2)
        if method == "GET":
            await self._reply(writer, self.pages[path], "200 OK")
            return
        self.headers.append(head)
        self.bodies.append(json.loads(content))
        if self.begins is not None:
            self.begins.set()
            await reader.read()  # until the client closes
            self.is_cancelled.set()
        answer = self.answer(self.bodies[-1]) if callable(self.answer) else self.answer
        await self._reply(writer, answer, self.status)

    async def _reply(self, writer: asyncio.StreamWriter, answer: Answer, status: str) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode())
        writer.write(content)
        writer.close()


@asynccontextmanager
async def serving(*apis: FakeApi) -> AsyncIterator[list[VllmServer]]:
    servers = [await asyncio.start_server(api.serve, HOST, 0) for api in apis]
    yield [VllmServer(HOST, server.sockets[0].getsockname()[1]) for server in servers]
    for server in servers:
        server.close()
