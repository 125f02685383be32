"""Responses: a request from its body to the last byte, and those that are stored."""

from __future__ import annotations

import secrets
import time
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.core.errors import InvalidRequest, NamedError
from baton.core.finish import Finish
from baton.router.answers import generate_answers
from baton.router.doors.field_names import renaming_fields
from baton.router.doors.openai.generation import model_context, served_name
from baton.router.doors.openai.request.bodies import with_session
from baton.router.doors.openai.request.structured_outputs import errors_of_field
from baton.router.doors.responses.parsed_response import FIELD_NAMES, ParsedResponse, response_from
from baton.router.doors.responses.response_object import ResponseObject
from baton.router.doors.responses.store import ResponseStore
from baton.router.http.bodies import ReceivedBody
from baton.router.http.errors import failure_of
from baton.router.http.exchange import ReceivedRequest, Reply
from baton.router.http.json_encoding import Json, as_json
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes
from baton.rpc.errors import UnknownResponse, UnsupportedInput

ID_BYTES = 24  # too many to guess: without tokens, an id is all that protects a response
NO_HISTORY = b"[]"
GONE = "it is unknown, expired or deleted, or another router has it"
NOT_STORED = "store: the response is too large, and was not stored"


@dataclass(frozen=True, slots=True)
class ResponseHandler:
    pipeline: Pipeline
    store: ResponseStore

    async def answer(self, request: ReceivedRequest, reply: Reply) -> None:
        with request.scope.ending_on_error():
            parsed = await self._parse(request)
        form_field = parsed.request.options.form_field
        with renaming_fields(FIELD_NAMES), errors_of_field(form_field):
            await self._answer(parsed, request, reply)

    async def _parse(self, request: ReceivedRequest) -> ParsedResponse:
        fields = with_session(await request.body.fields(), request.session_id)
        history = self.history(fields.get("previous_response_id"), request.scope.owner)
        context = model_context(self.pipeline, fields)
        parse = partial(response_from, fields, history, request.id, context)
        return await request.body.thread.run(len(request.body.raw) + len(history), parse)

    def history(self, previous: object, owner: str) -> bytes:
        """Return the items before this request. Raises InvalidRequest."""
        if not isinstance(previous, str):
            return NO_HISTORY
        found = self.store.find(owner, previous, time.monotonic())
        if found is None:
            raise InvalidRequest(
                f"previous_response_id {previous[:64]!r} was not found: {GONE}; send the whole "
                "conversation as input",
                "previous_response_id",
            )
        return found.history

    async def _answer(self, parsed: ParsedResponse, request: ReceivedRequest, reply: Reply) -> None:
        [call] = parsed.request.calls
        response = ResponseObject(
            parsed,
            f"resp_{secrets.token_hex(ID_BYTES)}",
            int(time.time()),
            served_name(self.pipeline, call),
            self.pipeline.profiles.of(call.model).text,
        )
        if not parsed.request.options.is_streamed:
            await self._send_whole(parsed, response, request, reply)
            return
        stream = Stream(response, request.body, reply)
        try:
            await self._send_stream(parsed, response, request, stream)
        except NamedError as error:
            if not stream.has_begun:
                raise
            await reply.send_events(response.failed(failure_of(error)), is_last=True)

    async def _send_whole(
        self,
        parsed: ParsedResponse,
        response: ResponseObject,
        request: ReceivedRequest,
        reply: Reply,
    ) -> None:
        answers = generate_answers(self.pipeline, request.scope, parsed.request.calls, 1)
        async with aclosing(answers) as parts:
            async for _, part in parts:
                response.events(part)
                if isinstance(part, Finish):
                    whole = await self._finish(parsed, response, request, part)
                    await reply.send_body([await request.body.run(partial(as_json, whole))])

    async def _send_stream(
        self,
        parsed: ParsedResponse,
        response: ResponseObject,
        request: ReceivedRequest,
        stream: Stream,
    ) -> None:
        answers = generate_answers(self.pipeline, request.scope, parsed.request.calls, 1)
        async with aclosing(answers) as parts:
            async for _, part in parts:
                events = response.events(part)
                is_last = isinstance(part, Finish)
                if isinstance(part, Finish):
                    whole = await self._finish(parsed, response, request, part)
                    events.append(response.last_event(whole))
                await stream.send(events, is_last=is_last)

    async def _finish(
        self,
        parsed: ParsedResponse,
        response: ResponseObject,
        request: ReceivedRequest,
        end: Finish,
    ) -> Json:
        """Return the whole response, and store it if the client wants that."""
        whole = response.whole(end, int(time.time()))
        if not parsed.is_stored:
            return whole
        encode = partial(as_json, [*parsed.items, *response.items])
        size = len(request.body.raw) + parsed.num_history_bytes
        history = await request.body.thread.run(size, encode)
        body = await request.body.run(partial(as_json, whole))
        owner, now = request.scope.owner, time.monotonic()
        if not self.store.put(owner, response.id, body, history, now):
            warnings = [*whole.get("warnings", ()), NOT_STORED]
            return {**whole, "store": False, "warnings": warnings}
        return whole


class Stream:
    """Stream of events, which begins with the response that is in progress."""

    def __init__(self, response: ResponseObject, body: ReceivedBody, reply: Reply) -> None:
        self._response = response
        self._body = body
        self._reply = reply
        self.has_begun = False

    async def send(self, events: list[Json], *, is_last: bool) -> None:
        # The first and the last events repeat much of the request's body.
        start = b"" if self.has_begun else await self._body.run(self._response.start)
        self.has_begun = True
        encode = partial(self._response.encode, events)
        encoded = await self._body.run(encode) if is_last else encode()
        await self._reply.send_events(start + encoded, is_last=is_last)


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
