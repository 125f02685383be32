"""Paths of Anthropic's Messages API, and their descriptions for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.routing import Route

from baton.router.doors.messages.bodies import MessagesBody, TokenCountBody
from baton.router.doors.messages.endpoints import MessageHandler, TokenCount
from baton.router.doors.messages.errors import MESSAGES_ERRORS
from baton.router.http.bodies import Bodies
from baton.router.http.exchange import GenerationEndpoint
from baton.router.http.openapi import Described
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
DESCRIPTIONS: Mapping[str, Described] = {
    MESSAGES: Described("Answer a chat, as Anthropic's API does", (MessagesBody,)),
    COUNT_TOKENS: Described("Count the tokens of a chat", (TokenCountBody,)),
}
REQUEST_ID = "request-id"  # header of responses that Anthropic's clients read


def messages_routes(pipeline: Pipeline, scopes: RequestScopes, bodies: Bodies) -> list[Route]:
    handler = MessageHandler(pipeline)
    create = GenerationEndpoint(scopes, bodies, MESSAGES_ERRORS, handler.answer, REQUEST_ID)
    count = TokenCount(pipeline, scopes, bodies).count
    return [
        Route(MESSAGES, create, methods=["POST"]),
        Route(COUNT_TOKENS, count, methods=["POST"]),
    ]
