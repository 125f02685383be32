"""The HTTP server's life, in the router's own event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from router.openai.connections import Acceptor, ConnectionLimits
from serving.descriptors import descriptor_limit, max_connections
from serving.http_tls import server_context
from serving.listening import listening_socket
from serving.tls import TlsConfig

# Answers have ended when it closes; so long their last bytes may take.
CLOSE_GRACE_S = 1
# Clients keep connections for their next request, for longer than uvicorn's 5 s.
KEEP_ALIVE_S = 75
# Connections that the system keeps until they are accepted; they take no descriptors.
BACKLOG = 1024

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Signals are the router's, which drains both doors."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def http_serving(
    app: ASGIApp, host: str, port: int, tls: TlsConfig, limits: ConnectionLimits | None = None
) -> AsyncIterator[str]:
    """Serves from here to the end of the block; yields its address. Raises AddressInUse.

    Without limits, the number of connections follows from the number of descriptors.
    """
    limits = limits or ConnectionLimits(max_connections(descriptor_limit()))
    listening = listening_socket(host, port, "--http-port")
    listening.listen(BACKLOG)
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
    config.load()
    server = Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[]))  # it accepts nothing by itself
    acceptor = Acceptor(listening, config, server.server_state, limits)
    accepting = asyncio.ensure_future(acceptor.run())
    taken: int = listening.getsockname()[1]
    scheme = "https" if tls.listens else "http"
    log.info("OpenAI's API on %s://%s:%d/v1", scheme, host, taken)
    try:
        yield f"{host}:{taken}"
    finally:
        accepting.cancel()
        await asyncio.wait([accepting])
        listening.close()
        server.should_exit = True
        await serving
