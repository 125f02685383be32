"""Completions and chats: a request from its body to the last byte of its response."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from baton.router.answers import generate_answers
from baton.router.doors.files import read_files
from baton.router.doors.openai.request.bodies import with_session
from baton.router.doors.openai.request.parsed_request import ModelContext, ParsedRequest
from baton.router.doors.openai.request.structured_outputs import errors_of_field
from baton.router.doors.openai.response.answers import (
    StreamedAnswer,
    WholeAnswer,
    make_header,
)
from baton.router.doors.openai.response.choices import EchoedPrompt
from baton.router.http.exchange import ReceivedRequest, Reply
from baton.router.http.json_encoding import encode_in_slices
from baton.router.pipeline import Pipeline
from baton.router.prompt_embeds import FIELD
from baton.router.values import GenerateCall, TextPrompt, TokenPrompt
from baton.rpc.errors import NoNodes

Read = Callable[[Mapping[str, Any], str, ModelContext], ParsedRequest]


@dataclass(frozen=True, slots=True)
class AnswerHandler:
    pipeline: Pipeline
    read: Read

    async def answer(self, request: ReceivedRequest, reply: Reply) -> None:
        with request.scope.ending_on_error():
            parsed = await self._parse(request)
            prompts = await self._repeated_prompts(parsed, request.scope.client)
        with errors_of_field(parsed.options.form_field):
            await self._answer(parsed, prompts, request, reply)

    async def _parse(self, request: ReceivedRequest) -> ParsedRequest:
        fields = with_session(await request.body.fields(), request.session_id)
        context = model_context(self.pipeline, fields)
        parsed = await request.body.run(partial(self.read, fields, request.id, context))
        if parsed.options.is_chat:
            return await read_files(parsed, self.pipeline, request)
        prompts = {id(call.prompt): call.prompt for call in parsed.calls}.values()
        pictures = (each.pictures for each in prompts if isinstance(each, TokenPrompt))
        request.body.hold_more(sum(len(each.rgb) for each in chain.from_iterable(pictures)))
        return parsed

    async def _repeated_prompts(self, parsed: ParsedRequest, client: str) -> list[EchoedPrompt]:
        """Return the prompt of each call; empty unless the answer repeats it."""
        if not parsed.options.needs_prompt_ids:
            return [EchoedPrompt()] * len(parsed.calls)
        inputs = self.pipeline.inputs
        prompts: list[EchoedPrompt] = []
        for call in parsed.calls[:: parsed.num_each]:
            token_ids = await inputs.token_ids(call.prompt, call.model, client)
            if isinstance(call.prompt, TextPrompt):
                text = call.prompt.text
            else:
                echoes = parsed.options.echoes
                text = await inputs.text(token_ids, call.model, client) if echoes else ""
            prompts += [EchoedPrompt(token_ids, text)] * parsed.num_each
        return prompts

    async def _answer(
        self,
        parsed: ParsedRequest,
        prompts: Sequence[EchoedPrompt],
        request: ReceivedRequest,
        reply: Reply,
    ) -> None:
        name = served_name(self.pipeline, parsed.calls[0])
        header = make_header(parsed, request.id, int(time.time()), name)
        text = self.pipeline.profiles.of(parsed.calls[0].model).text
        answers = generate_answers(self.pipeline, request.scope, parsed.calls, parsed.num_each)
        async with aclosing(answers) as parts:
            if not parsed.options.is_streamed:
                whole = WholeAnswer(parsed, header, prompts, text)
                async for index, part in parts:
                    whole.add(index, part)
                await reply.send_body(await encode_in_slices(whole.body()))
                return
            streamed = StreamedAnswer(parsed, header, prompts, text)
            async for index, part in parts:
                await reply.send_events(await streamed.chunk(index, part))
            await reply.send_events(streamed.end(), is_last=True)


def model_context(pipeline: Pipeline, fields: Mapping[str, Any]) -> ModelContext:
    """Return what the router knows of the model that a body names.

    Raises UnknownModel, and NoNodes if the body has embeddings that a missing node may take.
    """
    name = fields.get("model")
    model = pipeline.table.find_model(name if isinstance(name, str) else "")
    served, parsing = pipeline.table.served_model(model), pipeline.profiles.of(model).parsing
    embeds_size = served.prompt_embeds_size if pipeline.takes_prompt_embeds else None
    if FIELD in fields and embeds_size == 0 and not served.has_prefill_nodes:
        pipeline.inputs.check_model(model)
        raise NoNodes(
            f"no node that takes {FIELD} is known at the moment; try again later, or start a "
            "prefill node with --enable-prompt-embeds"
        )
    return ModelContext(served.sampling_defaults, served.max_model_len, parsing, model, embeds_size)


def served_name(pipeline: Pipeline, call: GenerateCall) -> str:
    """Return the model's name for the response."""
    return call.model.name or next(iter(pipeline.table.served.names), "")
