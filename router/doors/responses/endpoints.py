"""Responses over HTTP, and those that are stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.router.doors.openai.request.bodies import with_session
from baton.router.doors.responses.memory import GONE, TenantMemory
from baton.router.doors.responses.store import ResponseStore
from baton.router.doors.responses.turns import begin_turn
from baton.router.http.exchange import ReceivedRequest, Reply
from baton.router.http.json_encoding import Json, named_event
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes
from baton.rpc.errors import UnknownResponse, UnsupportedInput


@dataclass(frozen=True, slots=True)
class ResponseHandler:
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
