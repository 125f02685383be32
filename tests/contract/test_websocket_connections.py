"""WebSocket connections of the HTTP server: handshakes, limits on frames, time and number."""

from __future__ import annotations

import asyncio
import logging
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from baton.router.http.config import CorsConfig
from baton.router.http.connection_slots import ConnectionLimits
from baton.router.http.websocket_connection import MAX_FRAGMENTS
from baton.rpc.security.tls import TlsConfig
from baton.rpc.security.token import AcceptedTokens
from tests.support.certificates import make_authority
from tests.support.http_routers import HttpRouter, an_http_router
from tests.support.response_sockets import PATH, a_response_socket

MAX_S = 60
SOON_S = 0.05
PAGE, OTHER_PAGE = "https://chat.example", "https://other.example"
HANDSHAKE = (
    "{method} {path} HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: {version}\r\n\r\n"
)
TEXT, BINARY, CLOSE, PING, CONTINUATION, IS_LAST = 1, 2, 8, 9, 0, 0x80
PROTOCOL_ERROR, UNSUPPORTED, NO_UTF8 = 1002, 1003, 1007
POLICY_VIOLATION, TOO_BIG, INTERNAL_ERROR, TRY_AGAIN_LATER = 1008, 1009, 1011, 1013
LARGE = 1 << 17


def with_router(scenario: Callable[[HttpRouter], Awaitable[None]], **around: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(MAX_S), an_http_router(**around) as router:
            await scenario(router)

    asyncio.run(run())


class RawSocket:
    """WebSocket client that sends any bytes."""

    def __init__(self, reading: asyncio.StreamReader, writing: asyncio.StreamWriter) -> None:
        self.reading, self.writing = reading, writing

    async def shake_hands(
        self, method: str = "GET", path: str = PATH, version: str = "13"
    ) -> bytes:
        """Return the head of the answer."""
        self.writing.write(HANDSHAKE.format(method=method, path=path, version=version).encode())
        return await self.reading.readuntil(b"\r\n\r\n")

    def send(self, first_byte: int, payload: bytes, *, num_bytes: int | None = None) -> None:
        """Send a frame, which says that it has `num_bytes`."""
        size = len(payload) if num_bytes is None else num_bytes
        length = bytes([0x80 | size]) if size < 126 else b"\xff" + struct.pack("!Q", size)
        self.writing.write(bytes([first_byte]) + length + b"\0\0\0\0" + payload)

    async def close_code(self) -> int:
        """Return the code of the close frame, with which the server ends the connection."""
        received = await self.reading.read()
        return int(
            struct.unpack("!H", received[received.rindex(bytes([IS_LAST | CLOSE])) + 2 :][:2])[0]
        )


@asynccontextmanager
async def a_raw_socket(router: HttpRouter) -> AsyncIterator[RawSocket]:
    host, _, port = router.address.rpartition(":")
    reading, writing = await asyncio.open_connection(host, int(port))
    try:
        yield RawSocket(reading, writing)
    finally:
        writing.close()


def has_errors(caplog: pytest.LogCaptureFixture) -> bool:
    return any(record.levelno >= logging.ERROR for record in caplog.records)


async def status_of(router: HttpRouter, **headers: str) -> int:
    try:
        async with a_response_socket(router.address, headers) as client:
            response = client.connection.response
    except InvalidStatus as refusal:
        response = refusal.response
    assert response is not None
    assert response.headers["x-request-id"]
    return response.status_code


def test_a_connection_needs_a_token(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(router: HttpRouter) -> None:
        assert await status_of(router) == 401
        assert await status_of(router, authorization="Bearer other") == 401
        assert await status_of(router, authorization="Bearer one") == 101
        assert await status_of(router, **{"x-api-key": "one"}) == 101

    with_router(scenario, tokens=AcceptedTokens(("one",)))
    assert not has_errors(caplog)


@pytest.mark.parametrize(
    ("allowed", "statuses"),
    [((), [101, 403, 403]), ((PAGE,), [101, 101, 403]), (("*",), [101, 101, 101])],
)
def test_web_pages_connect_only_from_allowed_origins(
    allowed: tuple[str, ...], statuses: list[int]
) -> None:
    async def scenario(router: HttpRouter) -> None:
        pages: list[dict[str, str]] = [{}, {"origin": PAGE}, {"origin": OTHER_PAGE}]
        assert [await status_of(router, **page) for page in pages] == statuses

    with_router(scenario, cors=CorsConfig(allowed))


def test_a_handshake_is_refused_by_name() -> None:
    async def scenario(router: HttpRouter) -> None:
        assert await status_of(router, **{"x-request-id": "x" * 300}) == 400
        for method, path, version, status in (
            ("GET", "/health", "13", b"200"),
            ("GET", "/v1/none", "13", b"404"),
            ("POST", PATH, "13", b"400"),  # without a body
            ("GET", PATH, "12", b"400"),
        ):
            async with a_raw_socket(router) as client:
                assert status in await client.shake_hands(method, path, version)
        router.pipeline.is_draining = True
        assert await status_of(router) == 503

    with_router(scenario)


def test_wasteful_messages_close_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(router: HttpRouter) -> None:
        async def code_after(send: Callable[[RawSocket], None]) -> int:
            async with a_raw_socket(router) as client:
                assert b" 101 " in await client.shake_hands()
                send(client)
                return await client.close_code()

        def send_fragments(client: RawSocket) -> None:
            client.send(TEXT, b"")
            for _ in range(MAX_FRAGMENTS):
                client.send(CONTINUATION, b"")

        assert await code_after(send_fragments) == TOO_BIG
        assert await code_after(lambda client: client.send(TEXT, b"", num_bytes=1 << 30)) == TOO_BIG
        assert await code_after(lambda client: client.send(IS_LAST | BINARY, b"{}")) == UNSUPPORTED
        assert await code_after(lambda client: client.send(IS_LAST | TEXT, b"\xff")) == NO_UTF8
        assert await code_after(lambda client: client.send(0xF0 | TEXT, b"{}")) == PROTOCOL_ERROR
        assert await code_after(lambda client: client.send(TEXT, b'{"type":')) == POLICY_VIOLATION
        half = {"num_bytes": 64}
        assert await code_after(lambda client: client.send(TEXT, b"{", **half)) == POLICY_VIOLATION

    with_router(scenario, limits=ConnectionLimits(message_s=SOON_S, close_s=SOON_S))
    assert not has_errors(caplog)


def test_large_messages_that_arrive_share_a_limit() -> None:
    async def scenario(router: HttpRouter) -> None:
        async with a_raw_socket(router) as first, a_raw_socket(router) as second:
            for client in (first, second):
                await client.shake_hands()
            first.send(TEXT, b" " * LARGE, num_bytes=LARGE)
            first.send(IS_LAST | PING, b"")
            await first.reading.readexactly(2)  # the pong follows the first fragment
            second.send(TEXT, b" " * LARGE, num_bytes=LARGE)
            assert await second.close_code() == TRY_AGAIN_LATER
            first.send(IS_LAST | CONTINUATION, b"")
            assert b'"status":400' in await first.reading.readuntil(b"}}")
            async with a_raw_socket(router) as third:
                await third.shake_hands()
                third.send(IS_LAST | TEXT, b" " * LARGE, num_bytes=LARGE)
                assert b'"status":400' in await third.reading.readuntil(b"}}")

    with_router(scenario, limits=ConnectionLimits(max_arriving_bytes=LARGE + LARGE // 2))


def test_a_client_that_answers_no_ping_is_cut_off() -> None:
    async def scenario(router: HttpRouter) -> None:
        async with a_raw_socket(router) as client:
            await client.shake_hands()
            assert await client.close_code() == INTERNAL_ERROR

    with_router(scenario, limits=ConnectionLimits(ping_s=SOON_S, unread_s=SOON_S))


def test_others_go_on_between_many_small_messages() -> None:
    num_messages, num_turns = 500, 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def scenario(router: HttpRouter) -> None:
        counting = asyncio.ensure_future(count_turns())
        async with a_raw_socket(router) as flood:
            await flood.shake_hands()
            for _ in range(num_messages):
                flood.send(IS_LAST | TEXT, b"")
            num_before = num_turns
            for _ in range(num_messages):
                await flood.reading.readuntil(b"}}")
        counting.cancel()
        assert num_turns - num_before >= num_messages

    with_router(scenario)


def test_tls_connections_are_upgraded(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    cert, key = authority.issue("server", "localhost")

    async def scenario(router: HttpRouter) -> None:
        context = ssl.create_default_context(cafile=str(authority.ca))
        port = router.address.rpartition(":")[2]
        async with connect(f"wss://localhost:{port}{PATH}", ssl=context, proxy=None) as client:
            await client.send("{}")
            assert b"type is missing" in await client.recv(decode=False)

    with_router(scenario, tls=TlsConfig(cert, key))


@settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=20)), min_size=30, max_size=30))
def test_hostile_frames_leave_nothing(
    caplog: pytest.LogCaptureFixture, frames: list[tuple[int, bytes]]
) -> None:
    async def scenario(router: HttpRouter) -> None:
        for first_byte, payload in frames:
            async with a_raw_socket(router) as client:
                await client.shake_hands()
                client.send(first_byte, payload)
                client.send(IS_LAST | TEXT, b"{}")
                client.writing.write(payload)
                client.writing.write_eof()
                await client.reading.read()
        assert await status_of(router) == 101

    with_router(scenario)
    assert not has_errors(caplog)
