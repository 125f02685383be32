"""Completions and chats: from a body to calls of the pipeline, and from parts to an answer."""

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

from router.limits import check_name, is_name
from router.merging import IndexedParts, merged
from router.nodes import NodeTable
from router.openai.answers import StreamedAnswer, WholeAnswer, choices_of, heading_of
from router.openai.asking import Advice, Asked
from router.openai.choices import ToldPrompt
from router.openai.encoding import encoded
from router.openai.parsing import Parsing
from router.openai.reading import Bodies
from router.openai.receiving import while_connected
from router.openai.replies import Reply
from router.openai.tool_choice import refusals_naming_tools
from router.openai.warnings import Warnings
from router.pipeline import Pipeline
from router.text import by_id
from router.values import TextPrompt
from router.visits import Visit, Visits, received_now
from serving.status import NAMED

ID_BYTES = 12
REQUEST_ID, TRACE_ID = "x-request-id", "x-trace-id"

Read = Callable[[Mapping[str, Any], str, Advice], Asked]


@dataclass(frozen=True, slots=True)
class Kitchen:
    """What every generation needs."""

    pipeline: Pipeline
    table: NodeTable
    visits: Visits
    parsing: Parsing
    bodies: Bodies


class Generation:
    """An ASGI app for one path. All of a request is one task, which ends with its client."""

    def __init__(self, kitchen: Kitchen, read: Read) -> None:
        self._pipeline = kitchen.pipeline
        self._table = kitchen.table
        self._visits = kitchen.visits
        self._parsing = kitchen.parsing
        self._bodies = kitchen.bodies
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        given_id = request.headers.get(REQUEST_ID, "")
        request_id = given_id if is_name(given_id) else secrets.token_hex(ID_BYTES)
        visit = self._visits.begin(request_id, request.headers.items(), received_now())
        reply = Reply(scope, receive, send)
        reply.headers[REQUEST_ID] = request_id
        if visit.trace_id:
            reply.headers[TRACE_ID] = visit.trace_id
        with self._bodies.lease() as lease:
            try:
                with visit.before_the_call():
                    check_name(REQUEST_ID, given_id)
                    body = await self._bodies.read(request, lease)
            except NAMED as error:
                await reply.fail(error)
                return
            await while_connected(receive, self._serve(visit, request_id, body, reply))

    async def _serve(self, visit: Visit, request_id: str, body: bytes, reply: Reply) -> None:
        try:
            with visit.before_the_call():
                asked = await self._asked(body, request_id)
                prompts = await self._told_prompts(asked)
            with refusals_naming_tools(asked.telling.calling):
                await self._answer(asked, prompts, visit, request_id, reply)
        except NAMED as error:
            await reply.fail(error)

    async def _asked(self, body: bytes, request_id: str) -> Asked:
        fields = await self._bodies.fields(body)
        model = fields.get("model")
        model = model if isinstance(model, str) else ""
        defaults = self._table.sampling_defaults(model)
        advice = Advice(defaults, self._table.max_model_len(model), self._parsing)
        return await self._bodies.work_on(body, partial(self._read, fields, request_id, advice))

    async def _told_prompts(self, asked: Asked) -> list[ToldPrompt]:
        """One for each call; empty unless the answer repeats something of it."""
        if not asked.telling.needs_prompt_ids:
            return [ToldPrompt()] * len(asked.calls)
        told: list[ToldPrompt] = []
        for call in asked.calls[:: asked.num_each]:
            token_ids = await self._pipeline.token_ids(call.prompt, call.model)
            if isinstance(call.prompt, TextPrompt):
                text = call.prompt.text
            else:
                text = await self._pipeline.spelled(token_ids) if asked.telling.echoes else ""
            told += [ToldPrompt(token_ids, text)] * asked.num_each
        return told

    async def _answer(
        self,
        asked: Asked,
        prompts: Sequence[ToldPrompt],
        visit: Visit,
        request_id: str,
        reply: Reply,
    ) -> None:
        heading = heading_of(asked, request_id, int(time.time()), self._model(asked))
        spell = by_id if asked.telling.tokens_by_id else self._pipeline.token
        choices = choices_of(asked, prompts, spell, self._parsing)
        warnings = Warnings(asked.telling, self._parsing, shows_tools=self._pipeline.shows_tools)
        async with aclosing(self._parts(asked, visit)) as parts:
            if not asked.telling.is_streamed:
                whole = WholeAnswer(asked, heading, choices, spell, warnings)
                async for index, part in parts:
                    whole.take(index, part)
                await reply.whole(await encoded(whole.told()))
                return
            streamed = StreamedAnswer(asked, heading, choices, prompts, warnings)
            async for index, part in parts:
                await reply.tell(await streamed.events(index, part))
            await reply.tell(streamed.end(), is_last=True)

    def _parts(self, asked: Asked, visit: Visit) -> IndexedParts:
        return merged(self._visits.answering(visit, asked.calls, asked.num_each))

    def _model(self, asked: Asked) -> str:
        return asked.calls[0].model or next(iter(sorted(self._table.models)), "")
