"""Paths of OpenAI's Responses API, and their descriptions for the OpenAPI document."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from baton.core.errors import InvalidRequest
from baton.core.output import Finish, FinishReason
from baton.router.answers import generate_answers
from baton.router.doors.field_names import renaming_fields
from baton.router.doors.files import read_files
from baton.router.doors.openai.errors import OPENAI_ERRORS
from baton.router.doors.openai.generation import model_context
from baton.router.doors.openai.request.bodies import (
    Body,
    effective_fields,
    validate_body,
    with_session,
)
from baton.router.doors.responses.bodies import IGNORED_FIELDS, Items, ResponsesBody
from baton.router.doors.responses.parsed_response import (
    FIELD_NAMES,
    ParsedResponse,
    content_of,
    response_from,
)
from baton.router.doors.responses.response_object import usage_of
from baton.router.doors.responses.store import GONE, ResponseStore, TenantMemory
from baton.router.doors.responses.turns import begin_turn
from baton.router.doors.responses.websocket.session import (
    SESSION_LIMITS,
    Services,
    SessionLimits,
    WebSocketEndpoint,
)
from baton.router.http.bodies import Bodies
from baton.router.http.exchange import GenerationEndpoint, ReceivedRequest, Reply
from baton.router.http.json_encoding import Json, as_json, named_event
from baton.router.http.openapi import Described
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes
from baton.router.text_events.events import EventReader, TextEvent, fold
from baton.rpc.errors import GenerationFailed, UnknownResponse, UnsupportedInput

RESPONSES = "/v1/responses"
COMPACT = "/v1/responses/compact"
ONE = "/v1/responses/{response_id}"
ID_BYTES = 12
SUMMARIZE = (
    "Summarize this conversation for whoever continues it in its place: what was asked, decided, "
    "done and found, with all names, numbers and paths that matter, and what is open."
)
CUT_OFF = "the summary is cut off: the conversation leaves too little of the model's context"

NO_SUMMARY = (
    "the model wrote no summary, at most its reasoning: try again, or use another model or less "
    "input"
)


class CompactionBody(Body):
    model: str
    input: str | Items | None = None
    previous_response_id: str | None = None
    instructions: str | None = None


def compaction_from(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the request for the summary. Raises InvalidRequest."""
    own = effective_fields(fields, IGNORED_FIELDS)
    body = validate_body(own, CompactionBody)
    given = body.input or []
    items: Sequence[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items and body.previous_response_id is None:
        raise InvalidRequest("input is empty: send a text, or at least one item", "input")
    own["input"] = [*items, {"role": "user", "content": SUMMARIZE}]
    return {**own, "store": False}


@dataclass(frozen=True, slots=True)
class CompactionHandler:
    """Turns a conversation into one item, which holds a summary that the model writes."""

    pipeline: Pipeline
    store: ResponseStore

    async def answer(self, request: ReceivedRequest, reply: Reply) -> None:
        with request.scope.ending_on_error():
            parsed = await self._parse(request)
        created_at = int(time.time())
        text_format = parsed.request.options.text_format
        reader, texts = EventReader(text_format.parser, 1), list[TextEvent]()
        answers = generate_answers(self.pipeline, request.scope, parsed.request.calls, 1)
        with renaming_fields(FIELD_NAMES):
            async with aclosing(answers) as parts:
                async for _, part in parts:
                    texts += reader.read(0, part)
                    if isinstance(part, Finish):
                        whole = compacted(fold(texts).content.strip(), part, created_at)
                        await reply.send_body([await request.body.run(partial(as_json, whole))])

    async def _parse(self, request: ReceivedRequest) -> ParsedResponse:
        fields = compaction_from(await request.body.fields())
        memory = TenantMemory(self.store, request.scope.owner)
        history = memory.history(fields.get("previous_response_id"))
        await request.body.hold_json(history)
        context = model_context(self.pipeline, fields)
        parse = partial(response_from, fields, history, request.id, context)
        parsed = await request.body.run(parse)
        read = await read_files(parsed.request, self.pipeline, request)
        return replace(parsed, request=read)


def compacted(summary: str, end: Finish, created_at: int) -> Json:
    """Raises GenerationFailed for an answer without a summary."""
    if not summary:
        raise GenerationFailed(NO_SUMMARY)
    item = {
        "id": f"cmp_{secrets.token_hex(ID_BYTES)}",
        "type": "compaction",
        "encrypted_content": content_of(summary),
    }
    warnings = [*end.warnings, *([CUT_OFF] if end.reason is FinishReason.LENGTH else [])]
    return {
        "id": f"resp_{secrets.token_hex(ID_BYTES)}",
        "object": "response.compaction",
        "created_at": created_at,
        "output": [item],
        "usage": usage_of(end, num_reasoning_tokens=0),
        **({"warnings": warnings} if warnings else {}),
    }


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


@dataclass(frozen=True, slots=True)
class ResponseHandler:
    """Responses over HTTP."""

    pipeline: Pipeline
    store: ResponseStore

    async def answer(self, request: ReceivedRequest, reply: Reply) -> None:
        with request.scope.ending_on_error():
            fields = with_session(await request.body.fields(), request.session_id)
        memory = TenantMemory(self.store, request.scope.owner)
        turn = await begin_turn(self.pipeline, fields, request, memory)
        if turn.parsed.request.options.is_streamed:
            await turn.send(ServerSentEvents(reply))
        else:
            await reply.send_body([await turn.whole()])


@dataclass(frozen=True, slots=True)
class ServerSentEvents:
    reply: Reply

    def frame(self, event: Json) -> bytes:
        return named_event(event)

    async def send_frames(self, frames: Sequence[bytes], *, is_last: bool) -> None:
        await self.reply.send_events(b"".join(frames), is_last=is_last)


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """Retrieval and deletion, by the tenant that a response belongs to."""

    scopes: RequestScopes
    store: ResponseStore

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedInput("stream: a stored response is returned as a whole", "stream")
        found = self.store.find(*self._key(request), time.monotonic())
        if found is None:
            raise _unknown(request)
        return Response(found.body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        tenant, response_id = self._key(request)
        if not self.store.delete(tenant, response_id, time.monotonic()):
            raise _unknown(request)
        deleted: dict[str, Any] = {"id": response_id, "object": "response", "deleted": True}
        return JSONResponse(deleted)

    def _key(self, request: Request) -> tuple[str, str]:
        return self.scopes.owner_of(request.headers.items()), request.path_params["response_id"]


def _unknown(request: Request) -> UnknownResponse:
    shown = str(request.path_params["response_id"])[:64]
    return UnknownResponse(f"response {shown!r} was not found: {GONE}")
