"""Requests over HTTP: whose turn it is on the thread of large bodies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from starlette.requests import Request
from starlette.types import Message

from baton.router.byte_budget import ByteBudget
from baton.router.doors.openai.errors import OPENAI_ERRORS
from baton.router.http.bodies import SMALL_BODY_BYTES, Bodies, ReceivedBody
from baton.router.http.exchange import GenerationEndpoint, ReceivedRequest, Reply, receiving
from baton.router.request_scope import RequestScopes
from baton.router.routing.node_table import NodeTable

Work = Callable[[ReceivedBody], Awaitable[None]]
Serve = Callable[[Bodies, Request, Work], Awaitable[None]]


def request_from(host: str) -> Request:
    """Return a request with a large body, by a client without a token."""
    messages: list[Message] = [
        {"type": "http.request", "body": b"x" * (SMALL_BODY_BYTES + 1), "more_body": False}
    ]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    scope = {"type": "http", "headers": [], "method": "POST", "path": "/", "client": (host, 1)}
    return Request(scope, receive)


async def generate(bodies: Bodies, request: Request, work: Work) -> None:
    async def answer(received: ReceivedRequest, _reply: Reply) -> None:
        await work(received.body)

    async def send(_message: Message) -> None:
        raise AssertionError("there is no answer")

    endpoint = GenerationEndpoint(RequestScopes(), bodies, OPENAI_ERRORS, answer)
    await endpoint(request.scope, request.receive, send)


async def count(bodies: Bodies, request: Request, work: Work) -> None:
    async with receiving(request, RequestScopes(), bodies) as body:
        await work(body)


@pytest.mark.parametrize("serve", [generate, count])
def test_hosts_without_tokens_take_turns_on_the_thread_of_large_bodies(serve: Serve) -> None:
    hosts = ("10.0.0.1",) * 4 + ("10.0.0.2",)
    parsed: list[str] = []
    is_free = threading.Event()

    def parse(host: str) -> None:
        is_free.wait()
        parsed.append(host)

    async def run() -> None:
        arrivals = iter(hosts)

        async def work(body: ReceivedBody) -> None:
            host = next(arrivals)
            if host == hosts[-1]:  # all others wait
                asyncio.get_running_loop().call_soon(is_free.set)
            await body.run(partial(parse, host))

        bodies = Bodies(NodeTable(), ByteBudget())
        await asyncio.gather(*(serve(bodies, request_from(host), work) for host in hosts))

    asyncio.run(run())

    assert parsed.index(hosts[-1]) == 1
