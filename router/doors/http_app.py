"""ASGI app of all HTTP APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from baton.router.doors.error_formats import errors_of, handle_http_exception
from baton.router.doors.messages import routes as messages
from baton.router.doors.openai import routes as openai
from baton.router.doors.responses import routes as responses
from baton.router.http.app import Probes, Scrape, asgi_app
from baton.router.http.bodies import Bodies
from baton.router.http.config import NO_CORS, CorsConfig
from baton.router.http.openapi import documentation
from baton.router.orders.adapter_updates import AdapterUpdates
from baton.router.orders.node_orders import NodeOrders
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes
from baton.rpc.health import Health
from baton.rpc.security.token import AcceptedTokens
from baton.rpc.security.token_gate import ignore_refusal

DESCRIPTIONS = {**openai.DESCRIPTIONS, **messages.DESCRIPTIONS, **responses.DESCRIPTIONS}
WEBSOCKET_PATHS: tuple[str, ...] = (responses.RESPONSES,)

Door = Callable[[Pipeline, RequestScopes, Bodies], Sequence[BaseRoute]]
DOORS: tuple[Door, ...] = (messages.messages_routes, responses.responses_routes)  # beside OpenAI's


def http_app(
    *,
    pipeline: Pipeline,
    scopes: RequestScopes,
    health: Health,
    orders: NodeOrders,
    adapters: AdapterUpdates,
    scrape: Scrape,
    tokens: AcceptedTokens | None = None,
    on_refusal: Callable[[str], None] = ignore_refusal,
    cors: CorsConfig = NO_CORS,
    embed_truncate: bool = True,
    doors: Sequence[Door] = DOORS,
) -> ASGIApp:
    bodies = Bodies(pipeline.table, pipeline.byte_budget)
    routes: list[BaseRoute] = [
        *openai.openai_routes(
            pipeline, scopes, bodies, orders, adapters, embed_truncate=embed_truncate
        ),
        *(route for door in doors for route in door(pipeline, scopes, bodies)),
        *Probes(health, pipeline, scrape).routes,
    ]
    routes += documentation(routes, DESCRIPTIONS, has_tokens=tokens is not None)
    return asgi_app(routes, errors_of, handle_http_exception, tokens, on_refusal, cors)
