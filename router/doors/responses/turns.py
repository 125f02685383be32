"""One response, from the fields of its request to its last event, over any transport."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from baton.core.errors import NamedError
from baton.core.output import Finish, FinishReason
from baton.router.answers import IndexedParts, generate_answers
from baton.router.doors.field_names import renaming_fields
from baton.router.doors.files import documents_in, read_files
from baton.router.doors.openai.generation import model_context, served_name
from baton.router.doors.openai.request.structured_outputs import errors_of_field
from baton.router.doors.responses.files import put_texts
from baton.router.doors.responses.parsed_response import FIELD_NAMES, ParsedResponse, response_from
from baton.router.doors.responses.response_object import ResponseObject
from baton.router.doors.responses.store import TenantMemory
from baton.router.http.errors import failure_of
from baton.router.http.exchange import ReceivedRequest
from baton.router.http.json_encoding import Json, as_json
from baton.router.pipeline import Pipeline

ID_BYTES = 24  # too many to guess: without tokens, an id is all that protects a response
TOO_LARGE = "store: the response is too large, and was not stored"
TOO_LARGE_TO_CONTINUE = "store: the response is too large to be continued by previous_response_id"


class EventSink(Protocol):
    """Destination of the events of a response."""

    def frame(self, event: Json) -> bytes:
        """Return an event as it is sent."""

    async def send_frames(self, frames: Sequence[bytes], *, is_last: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """A response that is computed."""

    pipeline: Pipeline
    request: ReceivedRequest
    memory: TenantMemory
    parsed: ParsedResponse
    response: ResponseObject
    is_warmup: bool = False

    async def whole(self) -> bytes:
        """Return the response as JSON."""
        body = b""
        with self._naming_fields():
            async with aclosing(self._answers()) as parts:
                async for _, part in parts:
                    self.response.events(part)
                    if isinstance(part, Finish):
                        encode = partial(as_json, await self._finish(part))
                        body = await self.request.body.run(encode)
        return body

    async def send(self, sink: EventSink) -> None:
        """Send the events. Raises named errors, but only before the first event."""
        stream = EventStream(self, sink)
        previous = self.parsed.echo["previous_response_id"]
        try:
            with self.memory.forgetting_on_error(previous), self._naming_fields():
                await (self._warm_up(stream) if self.is_warmup else self._stream(stream))
        except NamedError as error:
            if not stream.has_begun:
                raise
            failed = self.response.failed(failure_of(error))
            await sink.send_frames([sink.frame(event) for event in failed], is_last=True)

    async def _stream(self, stream: EventStream) -> None:
        async with aclosing(self._answers()) as parts:
            async for _, part in parts:
                events = self.response.events(part)
                is_last = isinstance(part, Finish)
                if isinstance(part, Finish):
                    events.append(self.response.last_event(await self._finish(part)))
                await stream.send(events, is_last=is_last)

    async def _warm_up(self, stream: EventStream) -> None:
        """Compute the prompt, whose KV is cached then, and leave out the answer."""
        async with aclosing(self._answers()) as parts:
            async for _, part in parts:
                if isinstance(part, Finish):
                    whole = await self._finish(replace(part, reason=FinishReason.STOP))
                    await stream.send([self.response.last_event(whole)], is_last=True)

    def _answers(self) -> IndexedParts:
        calls = self.parsed.request.calls
        if self.is_warmup:
            [call] = calls
            sampling = replace(call.sampling, max_tokens=1, min_tokens=0)
            calls = (replace(call, sampling=sampling, fills_context=False),)
        return generate_answers(self.pipeline, self.request.scope, calls, 1)

    async def _finish(self, end: Finish) -> Json:
        """Return the whole response, and keep it if it can be continued."""
        whole = self.response.whole(end, int(time.time()))
        is_stored, body = self.parsed.is_stored, self.request.body
        if not self.memory.keeps(is_stored=is_stored):
            return whole
        history = await body.run(partial(self.parsed.conversation, self.response.items))
        stored = await body.run(partial(as_json, whole)) if is_stored else b""
        if self.memory.keep(self.response.id, stored, history, is_stored=is_stored):
            return whole
        warning = TOO_LARGE if is_stored else TOO_LARGE_TO_CONTINUE
        return {**whole, "store": False, "warnings": [*whole.get("warnings", ()), warning]}

    @contextmanager
    def _naming_fields(self) -> Iterator[None]:
        """Rewrite errors to name the fields that the client sent."""
        form_field = self.parsed.request.options.form_field
        with renaming_fields(FIELD_NAMES), errors_of_field(form_field):
            yield


class EventStream:
    """Events of a turn, which begin with the response that is in progress."""

    def __init__(self, turn: Turn, sink: EventSink) -> None:
        self._response = turn.response
        self._body = turn.request.body
        self._sink = sink
        self.has_begun = False

    async def send(self, events: list[Json], *, is_last: bool) -> None:
        # The first and the last events repeat much of the request's body.
        start = [] if self.has_begun else await self._body.run(self._start)
        self.has_begun = True
        frame = partial(self._frames, events)
        frames = await self._body.run(frame) if is_last else frame()
        await self._sink.send_frames([*start, *frames], is_last=is_last)

    def _start(self) -> list[bytes]:
        return list(map(self._sink.frame, self._response.start()))

    def _frames(self, events: Sequence[Json]) -> list[bytes]:
        return list(map(self._sink.frame, self._response.numbered(events)))


async def begin_turn(
    pipeline: Pipeline,
    fields: Mapping[str, Any],
    request: ReceivedRequest,
    memory: TenantMemory,
    *,
    is_warmup: bool = False,
) -> Turn:
    """Parse the fields of a request. Raises InvalidRequest and UnsupportedInput."""
    previous = fields.get("previous_response_id")
    with request.scope.ending_on_error(), memory.forgetting_on_error(previous):
        history = memory.history(previous)
        await request.body.hold_json(history)
        context = model_context(pipeline, fields)
        parse = partial(response_from, fields, history, request.id, context, is_warmup=is_warmup)
        parsed = await request.body.run(parse)
        parsed = replace(parsed, request=await read_files(parsed.request, pipeline, request))
    [call] = parsed.request.calls
    put_texts(parsed.items, documents_in(call.prompt))
    response = ResponseObject(
        parsed,
        f"resp_{secrets.token_hex(ID_BYTES)}",
        int(time.time()),
        served_name(pipeline, call),
        pipeline.profiles.of(call.model).text,
    )
    return Turn(pipeline, request, memory, parsed, response, is_warmup)
