"""ASGI app: the routes of all APIs, probes, authentication and errors outside of the APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from baton.core.errors import NamedError
from baton.router.http.config import NO_CORS, CorsConfig
from baton.router.http.errors import INTERNAL, ErrorFormats, failure_of
from baton.router.http.middleware import CONNECTS, RequestIds, WebSocketOrigins, with_cors
from baton.router.pipeline import Pipeline
from baton.rpc.errors import Unauthenticated
from baton.rpc.health import Health
from baton.rpc.security.token import HEADER, AcceptedTokens, authorization
from baton.rpc.security.token_gate import ignore_refusal
from baton.rpc.status import reason_of

# Probes send no tokens.
LIVE, HEALTH, READY, PING = "/live", "/health", "/ready", "/ping"
PATHS_WITHOUT_TOKEN = frozenset({LIVE, HEALTH, READY, PING})
API_KEY = "x-api-key"  # header of Anthropic's clients for the token

# Takes the Accept header. Returns the metrics and their content type.
Scrape = Callable[[str], tuple[bytes, str]]


@dataclass(frozen=True, slots=True)
class Probes:
    health: Health
    pipeline: Pipeline
    scrape: Scrape

    @property
    def routes(self) -> list[Route]:
        return [
            Route(LIVE, self._report_liveness),
            Route(HEALTH, self._report_readiness),
            Route(READY, self._report_readiness),
            Route(PING, self._ping, methods=["GET", "POST"]),
            Route("/load", self._load),
            Route("/metrics", self._metrics),
            Route("/version", self._version),
        ]

    @property
    def _is_ready(self) -> bool:
        """True unless the router drains or has no nodes yet."""
        return self.health.is_ready and not self.pipeline.is_draining

    async def _report_liveness(self, _request: Request) -> Response:
        return _probe_response(self.health.is_alive)

    async def _report_readiness(self, _request: Request) -> Response:
        return _probe_response(self._is_ready)

    async def _ping(self, _request: Request) -> Response:
        """Answer as vLLM does for SageMaker, which expects an empty body."""
        return Response(status_code=200 if self._is_ready else 503)

    async def _load(self, _request: Request) -> Response:
        """Return the number of requests that wait or are computed, under vLLM's name."""
        traffic = self.pipeline.traffic
        return JSONResponse({"server_load": traffic.num_waiting + traffic.num_in_flight})

    async def _metrics(self, request: Request) -> Response:
        # On a thread, since a scrape blocks on readings that this event loop provides.
        accept = request.headers.get("accept", "")
        body, kind = await asyncio.to_thread(self.scrape, accept)
        return Response(body, headers={"content-type": kind})

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": version("baton")})


def _probe_response(is_well: bool) -> Response:
    status = 200 if is_well else 503
    return JSONResponse({"status": "ok" if is_well else "unavailable"}, status)


def asgi_app(
    routes: Sequence[BaseRoute],
    errors_of: ErrorFormats,
    handle_http_exception: ExceptionHandler,
    tokens: AcceptedTokens | None = None,
    on_refusal: Callable[[str], None] = ignore_refusal,
    cors: CorsConfig = NO_CORS,
) -> ASGIApp:
    """Return the app. `handle_http_exception` handles unknown paths and methods."""

    async def handle_named(request: Request, error: Exception) -> Response:
        return errors_of(request.url.path).response(failure_of(error))

    async def handle_bug(request: Request, _error: Exception) -> Response:
        return errors_of(request.url.path).response(INTERNAL)

    app = Starlette(
        routes=list(routes),
        exception_handlers={
            NamedError: handle_named,
            HTTPException: handle_http_exception,
            Exception: handle_bug,
        },
    )
    gated = app if tokens is None else Gate(app, errors_of, tokens, on_refusal)
    return RequestIds(WebSocketOrigins(with_cors(gated, cors), errors_of, cors))


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """ASGI middleware that checks the bearer token before anything else is read."""

    app: ASGIApp
    errors_of: ErrorFormats
    accepted: AcceptedTokens
    on_refusal: Callable[[str], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in CONNECTS and scope["path"] not in PATHS_WITHOUT_TOKEN:
            scope = _with_bearer_token(scope)
            try:
                self.accepted.check(Headers(scope=scope).get(HEADER))
            except Unauthenticated as refusal:
                self.on_refusal(reason_of(Unauthenticated))
                errors = self.errors_of(scope["path"])
                await errors.response(failure_of(refusal))(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _with_bearer_token(scope: Scope) -> Scope:
    """Add the token of `x-api-key` as a bearer token, unless there is one."""
    headers = Headers(scope=scope)
    key = headers.get(API_KEY)
    if key is None or HEADER in headers:
        return scope
    name, value = authorization(key)
    return {**scope, "headers": [*scope["headers"], (name.encode(), value.encode("latin-1"))]}
