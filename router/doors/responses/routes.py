"""Paths of OpenAI's Responses API."""

from __future__ import annotations

from starlette.routing import Route

from baton.router.doors.openai.errors import OPENAI_ERRORS
from baton.router.doors.responses.compaction import CompactionHandler
from baton.router.doors.responses.endpoints import ResponseHandler, StoredResponses
from baton.router.doors.responses.store import ResponseStore
from baton.router.http.bodies import Bodies
from baton.router.http.exchange import GenerationEndpoint
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes

COMPACT = "/v1/responses/compact"
ONE = "/v1/responses/{response_id}"


def responses_routes(pipeline: Pipeline, scopes: RequestScopes, bodies: Bodies) -> list[Route]:
    store = ResponseStore()
    handler, stored = ResponseHandler(pipeline, store), StoredResponses(scopes, store)
    create = GenerationEndpoint(scopes, bodies, OPENAI_ERRORS, handler.answer)
    compact = CompactionHandler(pipeline, handler.history).answer
    return [
        Route(
            COMPACT, GenerationEndpoint(scopes, bodies, OPENAI_ERRORS, compact), methods=["POST"]
        ),
        Route("/v1/responses", create, methods=["POST"]),
        Route(ONE, stored.retrieve, methods=["GET"]),
        Route(ONE, stored.delete, methods=["DELETE"]),
    ]
