"""Router with the HTTP API in this process, with fake nodes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from grpc import aio
from prometheus_client import CollectorRegistry

from baton.router.admission.admission_queue import AdmissionQueueConfig
from baton.router.admission.rate_limits import NO_RATE_LIMITS, RateLimitConfig
from baton.router.dispatch.retries import DispatchConfig
from baton.router.doors.error_formats import DEFAULT_ERRORS
from baton.router.doors.http_app import WEBSOCKET_PATHS, http_app
from baton.router.doors.messages.routes import messages_routes
from baton.router.doors.responses.routes import responses_routes
from baton.router.doors.responses.websocket.session import SESSION_LIMITS, SessionLimits
from baton.router.http.config import NO_CORS, CorsConfig
from baton.router.http.connection_slots import ConnectionLimits
from baton.router.http.server import http_serving
from baton.router.input_processing.model_profiles import ModelProfiles
from baton.router.input_processing.tokenization import TextBoundary
from baton.router.orders.adapter_updates import AdapterUpdates
from baton.router.orders.node_orders import NodeOrders
from baton.router.pipeline import Pipeline, PipelineConfig
from baton.router.request_scope import RequestScopes
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.tracing import NO_REQUEST_TRACING, Tracing
from baton.router.values import NO_PARSING, Parsing
from baton.rpc.channel import open_channel
from baton.rpc.health import Health
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.rpc.security.token import AcceptedTokens, Operators
from baton.telemetry.metrics.instruments import exposition
from tests.support.node_calls import FakeNodeCalls, a_table
from tests.support.profiles import profiles_of
from tests.support.routers import UNCROWDED


@dataclass(frozen=True, slots=True)
class HttpRouter:
    address: str
    pipeline: Pipeline
    health: Health

    @property
    def url(self) -> str:
        return f"http://{self.address}"


@asynccontextmanager
async def an_http_router(
    node_calls: FakeNodeCalls | None = None,
    *,
    table: NodeTable | None = None,
    text: TextBoundary | None = None,
    profiles: ModelProfiles | None = None,  # instead of `text` and `parsing`
    admission_queue: AdmissionQueueConfig = UNCROWDED,
    tls: TlsConfig = PLAIN,
    tokens: AcceptedTokens | None = None,
    operators: Operators | None = None,
    tracing: Tracing = NO_REQUEST_TRACING,
    parsing: Parsing = NO_PARSING,
    limits: ConnectionLimits | None = None,
    channel: Callable[[str], aio.Channel] | None = None,  # to nodes, for what is no request
    adapters: AdapterUpdates | None = None,
    cors: CorsConfig = NO_CORS,
    embed_truncate: bool = True,
    rate_limits: RateLimitConfig = NO_RATE_LIMITS,
    sessions: SessionLimits = SESSION_LIMITS,
) -> AsyncIterator[HttpRouter]:
    table = table or a_table()
    pipeline = Pipeline(
        table=table,
        node_calls=node_calls or FakeNodeCalls(),
        profiles=profiles or profiles_of(table, text, parsing),
        clock=time.monotonic,
        config=PipelineConfig(
            DispatchConfig(routing=Routing(RoutingPolicy.ROUND_ROBIN)), admission_queue
        ),
    )
    health = Health(())
    await health.set_ready(True)
    operators = operators or Operators(is_open=tokens is None)
    app = http_app(
        pipeline=pipeline,
        scopes=RequestScopes(tracing, by_token=tokens is not None, rate_limits=rate_limits),
        health=health,
        orders=NodeOrders(table, channel or open_channel, operators),
        adapters=adapters or AdapterUpdates(table, channel or open_channel, operators),
        scrape=partial(exposition, CollectorRegistry()),
        tokens=tokens,
        cors=cors,
        embed_truncate=embed_truncate,
        doors=(messages_routes, partial(responses_routes, sessions=sessions)),
    )
    async with http_serving(
        app, "127.0.0.1", 0, tls, DEFAULT_ERRORS, limits, WEBSOCKET_PATHS
    ) as address:
        yield HttpRouter(address, pipeline, health)
