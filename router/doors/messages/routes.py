"""Paths of Anthropic's Messages API."""

from __future__ import annotations

from starlette.routing import Route

from baton.router.doors.messages.endpoints import MessageHandler, TokenCount
from baton.router.doors.messages.errors import MESSAGES_ERRORS
from baton.router.http.bodies import Bodies
from baton.router.http.exchange import GenerationEndpoint
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes

REQUEST_ID = "request-id"  # header of responses that Anthropic's clients read


def messages_routes(pipeline: Pipeline, scopes: RequestScopes, bodies: Bodies) -> list[Route]:
    handler = MessageHandler(pipeline)
    create = GenerationEndpoint(scopes, bodies, MESSAGES_ERRORS, handler.answer, REQUEST_ID)
    count = TokenCount(pipeline, scopes, bodies).count
    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]
