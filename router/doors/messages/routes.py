"""Paths of Anthropic's Messages API, and their descriptions for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.core.output import Finish
from baton.router.answers import generate_answers
from baton.router.doors.field_names import renaming_fields
from baton.router.doors.files import read_files
from baton.router.doors.messages.bodies import MessagesBody, TokenCountBody
from baton.router.doors.messages.errors import MESSAGES_ERRORS
from baton.router.doors.messages.parsed_message import (
    FIELD_NAMES,
    ParsedMessage,
    message_from,
    prompt_to_count,
)
from baton.router.doors.messages.response import MessageResponse
from baton.router.doors.openai.generation import model_context, served_name
from baton.router.doors.openai.request.bodies import with_session
from baton.router.doors.openai.request.structured_outputs import errors_of_field
from baton.router.http.bodies import Bodies, ReceivedBody, result_while_connected
from baton.router.http.exchange import GenerationEndpoint, ReceivedRequest, Reply, receiving
from baton.router.http.json_encoding import Json, encode_in_slices
from baton.router.http.openapi import Described
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes
from baton.router.values import GenerateCall

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


@dataclass(frozen=True, slots=True)
class MessageHandler:
    """Handles a request from its body to the last byte of its response."""

    pipeline: Pipeline

    async def answer(self, request: ReceivedRequest, reply: Reply) -> None:
        with request.scope.ending_on_error():
            parsed = await self._parse(request)
            [call] = parsed.request.calls
            if parsed.request.options.is_streamed:
                call = await self._tokenize(call, request.scope.client)
        form_field = parsed.request.options.form_field
        with renaming_fields(FIELD_NAMES), errors_of_field(form_field):
            await self._answer(parsed, call, request, reply)

    async def _parse(self, request: ReceivedRequest) -> ParsedMessage:
        fields = with_session(await request.body.fields(), request.session_id)
        context = model_context(self.pipeline, fields)
        parsed = await request.body.run(partial(message_from, fields, request.id, context))
        read = await read_files(parsed.request, self.pipeline, request)
        return replace(parsed, request=read)

    async def _tokenize(self, call: GenerateCall, client: str) -> GenerateCall:
        """Tokenize the prompt, whose length the first event reports."""
        self.pipeline.inputs.check_model(call.model)
        with renaming_fields(FIELD_NAMES):
            prompt = await self.pipeline.inputs.tokenize(call.prompt, call.model, client)
        return replace(call, prompt=prompt)

    async def _answer(
        self, parsed: ParsedMessage, call: GenerateCall, request: ReceivedRequest, reply: Reply
    ) -> None:
        text = self.pipeline.profiles.of(call.model).text
        response = MessageResponse(parsed, request.id, served_name(self.pipeline, call), text)
        answers = generate_answers(self.pipeline, request.scope, [call], 1)
        content: list[Json] = []
        is_streamed, has_begun = parsed.request.options.is_streamed, False
        async with aclosing(answers) as parts:
            async for _, part in parts:
                if not is_streamed:
                    content += response.content_events(part)
                    if isinstance(part, Finish):
                        whole = response.whole(content, part)
                        await reply.send_body(await encode_in_slices(whole))
                    continue
                start = b"" if has_begun else response.start(len(call.prompt_token_ids))
                has_begun = True
                await reply.send_events(
                    start + response.chunk(part), is_last=isinstance(part, Finish)
                )


@dataclass(frozen=True, slots=True)
class TokenCount:
    """`count_tokens`: the length of a prompt, which is not computed."""

    pipeline: Pipeline
    scopes: RequestScopes
    bodies: Bodies

    async def count(self, request: Request) -> Response:
        async with receiving(request, self.scopes, self.bodies) as received:
            return await result_while_connected(request.receive, self._count(received))

    async def _count(self, received: ReceivedBody) -> Response:
        fields = await received.fields()
        context = model_context(self.pipeline, fields)
        self.pipeline.inputs.check_model(context.variant)
        chat = await received.run(partial(prompt_to_count, fields, context))
        model, client = context.variant, received.client
        prompt = await self.pipeline.read_files(chat, model, client, received.hold_more)
        token_ids = await self.pipeline.inputs.token_ids(prompt, model, client)
        return JSONResponse({"input_tokens": len(token_ids)})
