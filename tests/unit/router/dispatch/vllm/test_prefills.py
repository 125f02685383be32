"""Prompts that vLLM servers compute for the router, over real connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.router.dispatch.vllm_prefills import ComputedKv, VllmPrefills

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
TOKENS = tuple(range(100))


class FakeApi:
    """Answers requests, and keeps their bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.answer: dict[str, Any] | bytes = {"kv_transfer_params": PARAMS}
        self.status = "200 OK"
        self.begins: asyncio.Event | None = None  # set when a prompt is being computed
        self.is_cancelled = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r")[0])
        content = await reader.readexactly(length)
        if head.startswith("GET /v1/models "):
            await self._reply(writer, {"data": [{"id": "served"}]}, "200 OK")
            return
        self.headers.append(head)
        self.bodies.append(json.loads(content))
        if self.begins is not None:
            self.begins.set()
            await reader.read()  # until the client closes
            self.is_cancelled.set()
        await self._reply(writer, self.answer, self.status)

    async def _reply(
        self, writer: asyncio.StreamWriter, answer: dict[str, Any] | bytes, status: str
    ) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode())
        writer.write(content)
        writer.close()


@asynccontextmanager
async def serving(*apis: FakeApi) -> AsyncIterator[list[tuple[str, int]]]:
    servers = [await asyncio.start_server(api.serve, HOST, 0) for api in apis]
    yield [(HOST, server.sockets[0].getsockname()[1]) for server in servers]
    for server in servers:
        server.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_prompt_is_computed_and_its_kv_named() -> None:
    async def test() -> None:
        api, now = FakeApi(), [50.0]
        async with serving(api) as addresses:
            prefills = VllmPrefills(addresses, lambda: now[0])
            computed = await prefills.compute(TOKENS, None, "00-trace-01")
            assert computed is not None
            assert (computed.kv.address, computed.kv.block_ids) == ("vllm:5600", (1, 2))
            now[0] = 53.0
            assert computed.aged(now[0]).age_s == 3.0
            [body] = api.bodies
            assert body["prompt"] == list(TOKENS)
            assert (body["model"], body["max_tokens"]) == ("served", 1)
            assert body["kv_transfer_params"]["do_remote_decode"]
            assert "traceparent: 00-trace-01" in api.headers[0]

    run(test)


BROKEN: dict[str, tuple[str, dict[str, Any] | bytes]] = {
    "error": ("500 Internal Server Error", {"error": "broken"}),
    "no JSON": ("200 OK", b"{"),
    "no object": ("200 OK", b"[1]"),
    "no connector": ("200 OK", {"choices": []}),
    "null": ("200 OK", {"kv_transfer_params": None}),
    "a text": ("200 OK", {"kv_transfer_params": "text"}),
    "other parameters": ("200 OK", {"kv_transfer_params": PARAMS | {"tp_size": 2}}),
    "deep": ("200 OK", b"[" * 100_000),
    "nothing": ("200 OK", b""),
}


@pytest.mark.parametrize(("status", "answer"), BROKEN.values(), ids=BROKEN)
def test_the_next_server_is_asked_when_one_fails(
    status: str, answer: dict[str, Any] | bytes
) -> None:
    async def test() -> None:
        broken, good = FakeApi(), FakeApi()
        broken.status, broken.answer = status, answer
        now = [0.0]
        async with serving(broken, good) as addresses:
            prefills = VllmPrefills(addresses, lambda: now[0])
            assert isinstance(await prefills.compute(TOKENS, None), ComputedKv)
            assert isinstance(await prefills.compute(TOKENS, None), ComputedKv)
            assert (len(broken.bodies), len(good.bodies)) == (1, 2)
            now[0] = 11.0  # it is tried again
            await prefills.compute(TOKENS, None)
            assert len(broken.bodies) == 2

    run(test)


def test_without_a_server_that_works_nothing_is_computed() -> None:
    async def test() -> None:
        async with serving(FakeApi()) as addresses:
            pass
        assert await VllmPrefills(addresses, lambda: 0.0).compute(TOKENS, None) is None
        assert not VllmPrefills((), lambda: 0.0)

    run(test)


def test_a_cancelled_request_closes_its_connection() -> None:
    async def test() -> None:
        api = FakeApi()
        api.begins = asyncio.Event()
        async with serving(api) as addresses:
            prefills = VllmPrefills(addresses, lambda: 0.0)
            computing = asyncio.ensure_future(prefills.compute(TOKENS, None))
            await api.begins.wait()
            computing.cancel()
            await api.is_cancelled.wait()

    run(test)


def test_a_late_server_is_given_up() -> None:
    async def test() -> None:
        api = FakeApi()
        api.begins = asyncio.Event()
        async with serving(api) as addresses:
            assert await VllmPrefills(addresses, lambda: 0.0).compute(TOKENS, 0.05) is None
            await api.is_cancelled.wait()

    run(test)
