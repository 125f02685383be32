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

from baton.core.errors import NamedError
from baton.router.answers import generate_answers
from baton.router.doors.openai.request.bodies import with_session
from baton.router.doors.openai.request.parsed_request import ModelContext, ParsedRequest
from baton.router.doors.openai.request.structured_outputs import errors_of_field
from baton.router.doors.openai.response.answers import (
    StreamedAnswer,
    WholeAnswer,
    make_choices,
    make_heading,
)
from baton.router.doors.openai.response.choices import EchoedPrompt
from baton.router.doors.openai.response.request_warnings import Warnings
from baton.router.http.bodies import Bodies, run_while_connected
from baton.router.http.json_encoding import encode_in_slices
from baton.router.http.replies import Reply
from baton.router.input_processing.limits import check_name, is_valid_name
from baton.router.input_processing.tokenization import by_id
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScope, RequestScopes
from baton.router.routing.node_table import NodeTable
from baton.router.text_events.output_parsers import Parsing
from baton.router.values import TextPrompt

ID_BYTES = 12
REQUEST_ID, TRACE_ID, SESSION_ID = "x-request-id", "x-trace-id", "x-session-id"

Read = Callable[[Mapping[str, Any], str, ModelContext], ParsedRequest]


@dataclass(frozen=True, slots=True)
class GenerationDependencies:
    """Dependencies of the generation endpoints."""

    pipeline: Pipeline
    table: NodeTable
    scopes: RequestScopes
    parsing: Parsing
    bodies: Bodies


class GenerationEndpoint:
    """ASGI app of one path. A request is one task, cancelled when its client disconnects."""

    def __init__(self, dependencies: GenerationDependencies, read: Read) -> None:
        self._pipeline = dependencies.pipeline
        self._table = dependencies.table
        self._scopes = dependencies.scopes
        self._parsing = dependencies.parsing
        self._bodies = dependencies.bodies
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        client_request_id = request.headers.get(REQUEST_ID, "")
        request_id = (
            client_request_id if is_valid_name(client_request_id) else secrets.token_hex(ID_BYTES)
        )
        request_scope = self._scopes.begin(request_id, request.headers.items())
        reply = Reply(scope, receive, send)
        reply.headers[REQUEST_ID] = request_id
        if request_scope.trace_id:
            reply.headers[TRACE_ID] = request_scope.trace_id
        with self._bodies.lease() as lease:
            try:
                with request_scope.ending_on_error():
                    check_name(REQUEST_ID, client_request_id)
                    session_id = request.headers.get(SESSION_ID, "")
                    check_name(SESSION_ID, session_id)
                    body = await self._bodies.read(request, lease)
            except NamedError as error:
                await reply.send_error(error)
                return
            serving = self._serve(request_scope, request_id, session_id, body, reply)
            await run_while_connected(receive, serving)

    async def _serve(
        self,
        request_scope: RequestScope,
        request_id: str,
        session_id: str,
        body: bytes,
        reply: Reply,
    ) -> None:
        try:
            with request_scope.ending_on_error():
                parsed = await self._parse(body, request_id, session_id)
                prompts = await self._repeated_prompts(parsed)
            with errors_of_field(parsed.options.form_field):
                await self._answer(parsed, prompts, request_scope, request_id, reply)
        except NamedError as error:
            await reply.send_error(error)

    async def _parse(self, body: bytes, request_id: str, session_id: str) -> ParsedRequest:
        fields = with_session(await self._bodies.fields(body), session_id)
        model = fields.get("model")
        model = model if isinstance(model, str) else ""
        served = self._table.served_model(model)
        advice = ModelContext(served.sampling_defaults, served.max_model_len, self._parsing)
        return await self._bodies.run_for_body(
            body, partial(self._read, fields, request_id, advice)
        )

    async def _repeated_prompts(self, parsed: ParsedRequest) -> list[EchoedPrompt]:
        """Return the prompt of each call; empty unless the answer repeats it."""
        if not parsed.options.needs_prompt_ids:
            return [EchoedPrompt()] * len(parsed.calls)
        inputs = self._pipeline.inputs
        prompts: list[EchoedPrompt] = []
        for call in parsed.calls[:: parsed.num_each]:
            token_ids = await inputs.token_ids(call.prompt, call.model)
            if isinstance(call.prompt, TextPrompt):
                text = call.prompt.text
            else:
                text = await inputs.text(token_ids) if parsed.options.echoes else ""
            prompts += [EchoedPrompt(token_ids, text)] * parsed.num_each
        return prompts

    async def _answer(
        self,
        parsed: ParsedRequest,
        prompts: Sequence[EchoedPrompt],
        request_scope: RequestScope,
        request_id: str,
        reply: Reply,
    ) -> None:
        heading = make_heading(parsed, request_id, int(time.time()), self._model(parsed))
        spell = by_id if parsed.options.tokens_by_id else self._pipeline.inputs.token
        choices = make_choices(parsed, prompts, spell, self._parsing)
        warnings = Warnings(
            parsed.options, self._parsing, supports_tools=self._pipeline.inputs.supports_tools
        )
        answers = generate_answers(self._pipeline, request_scope, parsed.calls, parsed.num_each)
        async with aclosing(answers) as parts:
            if not parsed.options.is_streamed:
                whole = WholeAnswer(parsed, heading, choices, spell, warnings)
                async for index, part in parts:
                    whole.take(index, part)
                await reply.send_body(await encode_in_slices(whole.body()))
                return
            streamed = StreamedAnswer(parsed, heading, choices, prompts, warnings)
            async for index, part in parts:
                await reply.send_events(await streamed.events(index, part))
            await reply.send_events(streamed.end(), is_last=True)

    def _model(self, parsed: ParsedRequest) -> str:
        return parsed.calls[0].model or next(iter(sorted(self._table.models)), "")
