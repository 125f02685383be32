"""Connection limits of the HTTP server: number, idle time and time per request."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from baton.router.http.connection_slots import ConnectionLimits
from baton.rpc.security.tls import PLAIN, TlsConfig
from tests.support.certificates import make_authority
from tests.support.http_routers import HttpRouter, an_http_router
from tests.support.node_calls import FakeNodeCalls

LONGEST_S = 60
SOON_S = 0.05
MAX_FILLED = 1024
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
ENDLESS = b'{"model":"tiny","prompt":[3],"max_tokens":400,"stream":true}'


@asynccontextmanager
async def a_connection(
    router: HttpRouter,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = router.address.rpartition(":")
    reading, writing = await asyncio.open_connection(host, int(port))
    try:
        yield reading, writing
    finally:
        writing.close()


def with_limits(
    limits: ConnectionLimits,
    scenario: Callable[[HttpRouter], Awaitable[None]],
    nodes: FakeNodeCalls | None = None,
    tls: TlsConfig = PLAIN,
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(LONGEST_S),  # rather than for ever
            an_http_router(nodes, limits=limits, tls=tls) as router,
        ):
            await scenario(router)

    asyncio.run(run())


async def health_of(router: HttpRouter) -> bytes:
    async with a_connection(router) as (reading, writing):
        writing.write(HEALTH)
        return await reading.readline()


def test_a_new_connection_replaces_the_longest_idle_one() -> None:
    async def scenario(router: HttpRouter) -> None:
        async with a_connection(router) as (oldest, _), a_connection(router) as (_, second):
            second.write(b"GET /hea")  # half a head is no request

            assert b"200" in await health_of(router)

            assert await oldest.read() == b""

    with_limits(ConnectionLimits(max_connections=2), scenario)


def test_tls_connections_without_a_handshake_use_up_no_slots(tmp_path: Path) -> None:
    async def scenario(router: HttpRouter) -> None:
        async with (
            a_connection(router) as (oldest, _),
            a_connection(router),
            a_connection(router),
        ):
            assert await oldest.read() == b""

    authority = make_authority(tmp_path)
    cert, key = authority.issue("server", "a.example")
    with_limits(ConnectionLimits(max_connections=2), scenario, tls=TlsConfig(cert, key))


def test_a_new_connection_is_refused_by_name_if_all_others_are_active() -> None:
    async def scenario(router: HttpRouter) -> None:
        async with a_connection(router) as (reading, writing):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(ENDLESS)}"
            writing.write(head.encode() + b"\r\n\r\n" + ENDLESS)
            assert b"200" in await reading.readline()

            async with a_connection(router) as (refused, _):
                reported = await refused.read()

            assert reported.startswith(b"HTTP/1.1 503")
            assert b"TOO_MANY_CONNECTIONS" in reported

    with_limits(ConnectionLimits(max_connections=1), scenario, FakeNodeCalls(is_endless=True))


def test_an_endless_request_head_is_cut_off() -> None:
    async def scenario(router: HttpRouter) -> None:
        async with a_connection(router) as (reading, writing):
            writing.write(HEALTH + b"GET /hea")
            assert b"200" in await reading.readline()

            assert b"HTTP" not in await reading.read()

    with_limits(ConnectionLimits(head_s=SOON_S), scenario)


def test_a_silent_connection_is_closed() -> None:
    async def scenario(router: HttpRouter) -> None:
        async with a_connection(router) as (reading, _):
            assert await reading.read() == b""

    with_limits(ConnectionLimits(head_s=SOON_S), scenario)


def test_an_endless_body_is_cut_off() -> None:
    async def scenario(router: HttpRouter) -> None:
        async with a_connection(router) as (reading, writing):
            writing.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")

            assert b"200" not in await reading.read()

    with_limits(ConnectionLimits(body_s=SOON_S), scenario)


def test_a_connection_with_an_answer_in_progress_outlives_the_idle_limits() -> None:
    async def scenario(router: HttpRouter) -> None:
        async with a_connection(router) as (reading, writing):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(ENDLESS)}"
            writing.write(head.encode() + b"\r\n\r\n" + ENDLESS)
            async with a_connection(router) as (silent, _):
                assert await silent.read() == b""  # its timeout, which began later, expired

            assert b"200" in await reading.readline()
            assert not reading.at_eof()

    limits = ConnectionLimits(head_s=SOON_S, body_s=SOON_S)
    with_limits(limits, scenario, FakeNodeCalls(is_endless=True))


class Lines(logging.Handler):
    """Log handler that counts records and sets an event when there are enough."""

    def __init__(self, enough: int) -> None:
        super().__init__()
        self._enough = enough
        self.records: list[logging.LogRecord] = []
        self.were_enough = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if len(self.records) >= self._enough:
            self.were_enough.set()


@contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILLED, hard))
        with suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def test_the_server_survives_descriptor_exhaustion_with_few_log_lines() -> None:
    async def scenario(router: HttpRouter) -> None:
        host, _, port = router.address.rpartition(":")
        lines = Lines(enough=3)
        logging.getLogger().addHandler(lines)
        # The system connects it; the loop, which has not run yet, accepts it without descriptors.
        with socket.create_connection((host, int(port))) as client:
            client.setblocking(False)
            try:
                with no_descriptors():
                    await lines.were_enough.wait()
            finally:
                logging.getLogger().removeHandler(lines)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, HEALTH)

            assert b"200" in await loop.sock_recv(client, 100)

        assert len(lines.records) == 3
        assert all(record.exc_info is None for record in lines.records)

    with_limits(ConnectionLimits(), scenario)


def test_connections_in_the_backlog_are_answered_when_the_server_stops() -> None:
    async def stop_at_once() -> list[socket.socket]:
        async with an_http_router() as router:
            host, _, port = router.address.rpartition(":")
            # The kernel has completed them; the server has accepted none yet.
            clients = [socket.create_connection((host, int(port)), LONGEST_S) for _ in range(8)]
            for client in clients[1:]:
                client.sendall(HEALTH)
            asyncio.get_running_loop().call_soon(clients[0].sendall, HEALTH)
        return clients

    for client in asyncio.run(stop_at_once()):
        with client, client.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
            answer.read()  # to the end of the connection


def test_a_stop_while_a_connection_waits_leaves_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    async def stop_at_once() -> None:
        async with an_http_router() as router:
            await health_of(router)  # the server waits for the next connection
            host, _, port = router.address.rpartition(":")
            with socket.create_connection((host, int(port)), LONGEST_S):
                pass

    asyncio.run(stop_at_once())

    assert [one.message for one in caplog.records if one.levelno > logging.INFO] == []
