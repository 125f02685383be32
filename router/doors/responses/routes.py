"""Paths of OpenAI's Responses API, and their descriptions for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.routing import BaseRoute, Route, WebSocketRoute

from baton.router.doors.openai.errors import OPENAI_ERRORS
from baton.router.doors.responses.bodies import ResponsesBody
from baton.router.doors.responses.compaction import CompactionBody, CompactionHandler
from baton.router.doors.responses.endpoints import ResponseHandler, StoredResponses
from baton.router.doors.responses.store import ResponseStore
from baton.router.doors.responses.websocket.endpoint import WebSocketEndpoint
from baton.router.doors.responses.websocket.session import SESSION_LIMITS, Services, SessionLimits
from baton.router.http.bodies import Bodies
from baton.router.http.exchange import GenerationEndpoint
from baton.router.http.openapi import Described
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes

RESPONSES = "/v1/responses"
COMPACT = "/v1/responses/compact"
ONE = "/v1/responses/{response_id}"
DESCRIPTIONS: Mapping[str, Described] = {
    RESPONSES: Described("Answer a list of items", (ResponsesBody,)),
    COMPACT: Described("Summarize a conversation", (CompactionBody,)),
    ONE: Described("Return or delete a stored response"),
}


def responses_routes(
    pipeline: Pipeline,
    scopes: RequestScopes,
    bodies: Bodies,
    sessions: SessionLimits = SESSION_LIMITS,
) -> list[BaseRoute]:
    store = ResponseStore()
    handler, stored = ResponseHandler(pipeline, store), StoredResponses(scopes, store)
    create = GenerationEndpoint(scopes, bodies, OPENAI_ERRORS, handler.answer)
    services = Services(pipeline, scopes, bodies, store, sessions)
    compact = CompactionHandler(pipeline, store).answer
    return [
        Route(
            COMPACT, GenerationEndpoint(scopes, bodies, OPENAI_ERRORS, compact), methods=["POST"]
        ),
        Route(RESPONSES, create, methods=["POST"]),
        WebSocketRoute(RESPONSES, WebSocketEndpoint(services)),
        Route(ONE, stored.retrieve, methods=["GET"]),
        Route(ONE, stored.delete, methods=["DELETE"]),
    ]
