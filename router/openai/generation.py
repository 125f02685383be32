"""Completions and chats: a request from its body to the last byte of its response."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from router.input_processing.limits import check_name, is_name
from router.input_processing.tokenization import by_id
from router.merging import IndexedParts, merged
from router.openai.body_parsing import Bodies
from router.openai.body_receiving import while_connected
from router.openai.replies import Reply
from router.openai.request.parsed_request import Advice, Asked
from router.openai.request.tool_choice import refusals_naming_tools
from router.openai.response.answers import StreamedAnswer, WholeAnswer, choices_of, heading_of
from router.openai.response.choices import ToldPrompt
from router.openai.response.encoding import encoded
from router.openai.response.output_parsers import Parsing
from router.openai.response.request_warnings import Warnings
from router.pipeline import Pipeline
from router.request_scope import Visit, Visits, received_now
from router.routing.node_table import NodeTable
from router.values import TextPrompt
from rpc.status import NAMED

ID_BYTES = 12
REQUEST_ID, TRACE_ID = "x-request-id", "x-trace-id"

Read = Callable[[Mapping[str, Any], str, Advice], Asked]


@dataclass(frozen=True, slots=True)
class Kitchen:
    """Dependencies of the generation endpoints."""

    pipeline: Pipeline
    table: NodeTable
    visits: Visits
    parsing: Parsing
    bodies: Bodies


class Generation:
    """ASGI app of one path. A request is one task, cancelled when its client disconnects."""

    def __init__(self, kitchen: Kitchen, read: Read) -> None:
        self._pipeline = kitchen.pipeline
        self._table = kitchen.table
        self._visits = kitchen.visits
        self._parsing = kitchen.parsing
        self._bodies = kitchen.bodies
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        client_request_id = request.headers.get(REQUEST_ID, "")
        request_id = (
            client_request_id if is_name(client_request_id) else secrets.token_hex(ID_BYTES)
        )
        visit = self._visits.begin(request_id, request.headers.items(), received_now())
        reply = Reply(scope, receive, send)
        reply.headers[REQUEST_ID] = request_id
        if visit.trace_id:
            reply.headers[TRACE_ID] = visit.trace_id
        with self._bodies.lease() as lease:
            try:
                with visit.before_the_call():
                    check_name(REQUEST_ID, client_request_id)
                    body = await self._bodies.read(request, lease)
            except NAMED as error:
                await reply.send_error(error)
                return
            await while_connected(receive, self._serve(visit, request_id, body, reply))

    async def _serve(self, visit: Visit, request_id: str, body: bytes, reply: Reply) -> None:
        try:
            with visit.before_the_call():
                parsed = await self._parse(body, request_id)
                prompts = await self._repeated_prompts(parsed)
            with refusals_naming_tools(parsed.telling.calling):
                await self._answer(parsed, prompts, visit, request_id, reply)
        except NAMED as error:
            await reply.send_error(error)

    async def _parse(self, body: bytes, request_id: str) -> Asked:
        fields = await self._bodies.fields(body)
        model = fields.get("model")
        model = model if isinstance(model, str) else ""
        defaults = self._table.sampling_defaults(model)
        advice = Advice(defaults, self._table.max_model_len(model), self._parsing)
        return await self._bodies.work_on(body, partial(self._read, fields, request_id, advice))

    async def _repeated_prompts(self, parsed: Asked) -> list[ToldPrompt]:
        """Return the prompt of each call; empty unless the answer repeats it."""
        if not parsed.telling.needs_prompt_ids:
            return [ToldPrompt()] * len(parsed.calls)
        prompts: list[ToldPrompt] = []
        for call in parsed.calls[:: parsed.num_each]:
            token_ids = await self._pipeline.token_ids(call.prompt, call.model)
            if isinstance(call.prompt, TextPrompt):
                text = call.prompt.text
            else:
                text = await self._pipeline.spelled(token_ids) if parsed.telling.echoes else ""
            prompts += [ToldPrompt(token_ids, text)] * parsed.num_each
        return prompts

    async def _answer(
        self,
        parsed: Asked,
        prompts: Sequence[ToldPrompt],
        visit: Visit,
        request_id: str,
        reply: Reply,
    ) -> None:
        heading = heading_of(parsed, request_id, int(time.time()), self._model(parsed))
        spell = by_id if parsed.telling.tokens_by_id else self._pipeline.token
        choices = choices_of(parsed, prompts, spell, self._parsing)
        warnings = Warnings(parsed.telling, self._parsing, shows_tools=self._pipeline.shows_tools)
        async with aclosing(self._parts(parsed, visit)) as parts:
            if not parsed.telling.is_streamed:
                whole = WholeAnswer(parsed, heading, choices, spell, warnings)
                async for index, part in parts:
                    whole.take(index, part)
                await reply.send_body(await encoded(whole.body()))
                return
            streamed = StreamedAnswer(parsed, heading, choices, prompts, warnings)
            async for index, part in parts:
                await reply.send_events(await streamed.events(index, part))
            await reply.send_events(streamed.end(), is_last=True)

    def _parts(self, parsed: Asked, visit: Visit) -> IndexedParts:
        return merged(self._visits.answering(visit, parsed.calls, parsed.num_each))

    def _model(self, parsed: Asked) -> str:
        return parsed.calls[0].model or next(iter(sorted(self._table.models)), "")
