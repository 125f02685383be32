"""The HTTP server's life, in the router's own event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from serving.http_tls import server_context
from serving.listening import listening_socket
from serving.tls import TlsConfig

# Answers have ended when it closes; so long their last bytes may take.
CLOSE_GRACE_S = 1
# Clients keep connections for their next request, for longer than uvicorn's 5 s.
KEEP_ALIVE_S = 75

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Signals are the router's, which drains both doors."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def http_serving(app: ASGIApp, host: str, port: int, tls: TlsConfig) -> AsyncIterator[str]:
    """Serves from here to the end of the block; yields its address. Raises AddressInUse."""
    listening = listening_socket(host, port, "--http-port")
    config = uvicorn.Config(
        app,
        http="h11",  # bounds what it reads of a header
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_GRACE_S,
        ssl_context_factory=(lambda *_: server_context(tls)) if tls.listens else None,
    )
    server = Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    taken: int = listening.getsockname()[1]
    scheme = "https" if tls.listens else "http"
    log.info("OpenAI's API on %s://%s:%d/v1", scheme, host, taken)
    try:
        yield f"{host}:{taken}"
    finally:
        server.should_exit = True
        await serving
