"""HTTP server lifecycle, in the router's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from baton.router.byte_budget import ByteBudget
from baton.router.http.bodies import MAX_BODY_BYTES
from baton.router.http.connection_slots import ConnectionLimits
from baton.router.http.connections import Acceptor
from baton.router.http.errors import ErrorFormat
from baton.router.http.websocket_connection import WebSocketPaths
from baton.rpc.listening import descriptor_limit, listening_socket, max_connections
from baton.rpc.security.certificates import http_context
from baton.rpc.security.tls import TlsConfig

# Time for the last bytes of answers, which have ended when the server closes.
CLOSE_GRACE_S = 1
# Clients keep idle connections for longer than uvicorn's default of 5 s.
KEEP_ALIVE_S = 75
# Length of the kernel's accept queue, whose connections use no descriptors.
BACKLOG = 1024
DATE_INTERVAL_S = 1.0  # at which the header `date` is written again

log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn server without signal handlers: the router handles signals and drains."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._closing = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Do what uvicorn does once in ten ticks. An idle router would wake up for each tick."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(DATE_INTERVAL_S):
                    await self._closing.wait()

    def close(self) -> None:
        self.should_exit = True
        self._closing.set()


@asynccontextmanager
async def http_serving(
    app: ASGIApp,
    host: str,
    port: int,
    tls: TlsConfig,
    errors: ErrorFormat,
    limits: ConnectionLimits | None = None,
    websocket_paths: Collection[str] = (),
) -> AsyncIterator[str]:
    """Serve until the block ends, and yield the address. Raises AddressInUse.

    By default, the limit of connections is derived from the limit of file descriptors.
    `websocket_paths` can be upgraded to WebSocket.
    """
    limits = limits or ConnectionLimits(max_connections(descriptor_limit()))
    listening = listening_socket(host, port, "--http-port")
    listening.listen(BACKLOG)
    config = uvicorn.Config(
        app,
        http="h11",  # limits the size of headers
        ws="websockets-sansio",
        ws_max_size=MAX_BODY_BYTES,
        ws_per_message_deflate=False,  # a small message could become a large one
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_GRACE_S,
        ssl_context_factory=(lambda *_: http_context(tls)) if tls.listens else None,
    )
    config.load()
    server = HttpServer(config)
    serving = asyncio.ensure_future(server.serve(sockets=[]))  # connections come from the Acceptor
    arriving = ByteBudget(limits.max_arriving_bytes)
    websockets = WebSocketPaths(frozenset(websocket_paths), arriving)
    acceptor = Acceptor(listening, config, server.server_state, limits, errors, websockets)
    accepting = asyncio.ensure_future(acceptor.run())
    bound_port: int = listening.getsockname()[1]
    scheme = "https" if tls.listens else "http"
    log.info("HTTP APIs on %s://%s:%d/v1", scheme, host, bound_port)
    try:
        yield f"{host}:{bound_port}"
    finally:
        accepting.cancel()
        await asyncio.wait([accepting])
        await acceptor.close(CLOSE_GRACE_S)
        server.close()
        await serving
