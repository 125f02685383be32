"""ASGI app of the HTTP API: routes, authentication and error handlers."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.core.errors import NamedError
from baton.router.doors.openai.endpoints import (
    PrefixCacheEndpoint,
    ProbeEndpoints,
    Scrape,
    Tokens,
    models_of,
)
from baton.router.doors.openai.generation import GenerationDependencies, GenerationEndpoint
from baton.router.doors.openai.request.parsed_request import chat_completion_from, completion_from
from baton.router.doors.unserved import handle_http_exception
from baton.router.http.bodies import Bodies
from baton.router.http.errors import error_response, handle_bug, tell_named
from baton.router.pipeline import Pipeline
from baton.router.prefix_resets import PrefixResets
from baton.router.request_scope import RequestScopes
from baton.router.routing.node_table import NodeTable
from baton.router.text_events.output_parsers import NO_PARSING, Parsing
from baton.rpc.errors import Unauthenticated
from baton.rpc.health import Health
from baton.rpc.security.token import HEADER, AcceptedTokens
from baton.rpc.security.token_gate import ignore_refusal
from baton.rpc.status import reason_of

# Paths without authentication: probes send no tokens.
PATHS_WITHOUT_TOKEN = frozenset({"/health", "/ready"})


def http_app(
    *,
    pipeline: Pipeline,
    table: NodeTable,
    scopes: RequestScopes,
    health: Health,
    resets: PrefixResets,
    scrape: Scrape,
    parsing: Parsing = NO_PARSING,
    root: str = "",
    tokens: AcceptedTokens | None = None,
    on_refusal: Callable[[str], None] = ignore_refusal,
) -> ASGIApp:
    bodies = Bodies(table)
    generation = GenerationDependencies(pipeline, table, scopes, parsing, bodies)
    models, texts = models_of(table, root), Tokens(pipeline.inputs, table, bodies)
    probes = ProbeEndpoints(health, pipeline, scrape)
    app = Starlette(
        routes=[
            _post("/v1/completions", GenerationEndpoint(generation, completion_from)),
            _post("/v1/chat/completions", GenerationEndpoint(generation, chat_completion_from)),
            Route("/v1/models", models.all),
            Route("/v1/models/{model:path}", models.one),
            _post("/tokenize", texts.of_text),
            _post("/detokenize", texts.to_text),
            _post("/reset_prefix_cache", PrefixCacheEndpoint(resets, bodies).reset),
            Route("/health", probes.is_alive),
            Route("/ready", probes.is_ready),
            Route("/metrics", probes.metrics),
            Route("/version", probes.version),
        ],
        exception_handlers={
            NamedError: tell_named,
            HTTPException: handle_http_exception,
            Exception: handle_bug,
        },
    )
    return app if tokens is None else Gate(app, tokens, on_refusal)


def _post(path: str, endpoint: Callable[..., object]) -> Route:
    return Route(path, endpoint, methods=["POST"])


class Gate:
    """ASGI middleware that checks the bearer token before anything else is read."""

    def __init__(
        self, app: ASGIApp, accepted: AcceptedTokens, on_refusal: Callable[[str], None]
    ) -> None:
        self._app = app
        self._accepted = accepted
        self._on_refusal = on_refusal  # called with the reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PATHS_WITHOUT_TOKEN:
            try:
                self._accepted.check(Request(scope).headers.get(HEADER))
            except Unauthenticated as refusal:
                self._on_refusal(reason_of(Unauthenticated))
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)
