"""ASGI middleware around all HTTP APIs: request ids, and requests of web pages."""

from __future__ import annotations

import secrets
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.router.http.config import ANY_ORIGIN, CorsConfig
from baton.router.http.errors import ErrorFormats, HttpFailure
from baton.router.input_processing.limits import is_valid_name

ID_BYTES = 12
REQUEST_ID, TRACE_ID, SESSION_ID = "x-request-id", "x-trace-id", "x-session-id"
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{kind}-{of}"
    for of in ("requests", "tokens")
    for kind in ("limit", "remaining", "reset")
)
# Headers of responses that web pages may read.
EXPOSED_HEADERS = (REQUEST_ID, TRACE_ID, "retry-after", *RATE_LIMIT_HEADERS)
ALLOWED_METHODS = ("GET", "POST", "DELETE")
CONNECTS = ("http", "websocket")  # types of scopes
HEAD_MESSAGES = ("http.response.start", "websocket.accept", "websocket.http.response.start")
FOREIGN_PAGE = HttpFailure(
    403,
    "WebSocket connections of web pages are refused: start the router with allowed-origins, or "
    "call this server from a program",
    "ORIGIN_NOT_ALLOWED",
)


class RequestIds:
    """Gives each request an id, that of its `X-Request-Id` if valid, and returns it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in CONNECTS:
            await self._app(scope, receive, send)
            return
        shown = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = shown if is_valid_name(shown) else secrets.token_hex(ID_BYTES)
        scope.setdefault("state", {})[REQUEST_ID] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] in HEAD_MESSAGES:
                message.setdefault("headers", [])
                MutableHeaders(scope=message).setdefault(REQUEST_ID, request_id)
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    """Return the id that `RequestIds` gave to a request."""
    state: dict[str, Any] = scope.get("state", {})
    return str(state.get(REQUEST_ID, "")) or secrets.token_hex(ID_BYTES)


class WebSocketOrigins:
    """Refuses WebSocket connections of web pages, unless their origin is allowed.

    CORS does not protect WebSockets: browsers connect to any host, and say from which page.
    """

    def __init__(self, app: ASGIApp, errors_of: ErrorFormats, config: CorsConfig) -> None:
        self._app = app
        self._errors_of = errors_of
        self._allowed = frozenset(config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and not self._is_allowed(Headers(scope=scope)):
            refuse = self._errors_of(scope["path"]).response(FOREIGN_PAGE)
            await refuse(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        return ANY_ORIGIN in self._allowed or all(origin in self._allowed for origin in origins)


def with_cors(app: ASGIApp, config: CorsConfig) -> ASGIApp:
    """Return the app with answers for browsers, if there are allowed origins.

    It is outside of the check of tokens, since browsers send none with a preflight.
    """
    if not config.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=ALLOWED_METHODS,
        allow_headers=("*",),
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED_HEADERS,
    )
