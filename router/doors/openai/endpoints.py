"""Endpoints for models, tokenization and prefix caches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.core.ids import ModelVariant
from baton.router.doors.files import read_prompt
from baton.router.doors.openai.request.bodies import (
    DetokenizeBody,
    ResetBody,
    TokenizeChatBody,
    TokenizeTextBody,
    openai_body,
)
from baton.router.doors.openai.request.prompts import chat_from, messages_from
from baton.router.http.bodies import Bodies, ReceivedBody, result_while_connected
from baton.router.http.exchange import receiving
from baton.router.http.json_encoding import Json, as_json
from baton.router.orders.node_orders import NodeOrders
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes
from baton.router.values import ChatPrompt, Prompt, TextPrompt
from baton.rpc.errors import UnknownModel
from baton.rpc.security.token import HEADER


@dataclass(frozen=True, slots=True)
class Models:
    """`/v1/models`: the models that nodes serve, and their adapters."""

    pipeline: Pipeline
    since: int = field(default_factory=lambda: int(time.time()))

    async def list_all(self, _request: Request) -> Response:
        served = self.pipeline.table.served
        cards = [self._card(served.variants[name]) for name in served.names]
        return JSONResponse({"object": "list", "data": cards})

    async def show(self, request: Request) -> Response:
        name, served = request.path_params["model"], self.pipeline.table.served
        if name not in served.variants:
            listed = served.listed() or "none yet"
            raise UnknownModel(f"model {name!r} is not served here; served: {listed}")
        return JSONResponse(self._card(served.variants[name]))

    def _card(self, variant: ModelVariant) -> Json:
        model, adapter = self.pipeline.table.served_model(variant), variant.adapter
        root = adapter.path if adapter.name else self.pipeline.profiles.of(variant).root
        return {
            "id": variant.name,
            "object": "model",
            "created": self.since,
            "owned_by": "baton",
            "root": root or variant.name,
            "parent": variant.base if adapter.name else None,
            "max_model_len": model.max_model_len,
            "max_sequence_len": model.max_sequence_len,  # limit of the KV caches
            "tasks": model.tasks,
        }


@dataclass(frozen=True, slots=True)
class Tokens:
    pipeline: Pipeline
    scopes: RequestScopes
    bodies: Bodies

    async def tokenize(self, request: Request) -> Response:
        async with receiving(request, self.scopes, self.bodies) as received:
            return await result_while_connected(request.receive, self._tokenize(received))

    async def _tokenize(self, received: ReceivedBody) -> Response:
        fields = await received.fields()
        body: TokenizeTextBody | TokenizeChatBody
        prompt: Prompt
        if "messages" in fields:
            body, chat = await received.run(partial(_chat_to_tokenize, fields))
            named = self.pipeline.table.find_model(body.model)
            prompt = await read_prompt(chat, self.pipeline, received, named)
        else:
            body = openai_body(fields, TokenizeTextBody)
            prompt = TextPrompt(body.prompt, body.add_special_tokens)
        model = self.pipeline.table.find_model(body.model)
        self.pipeline.inputs.check_model(model)
        token_ids = await self.pipeline.inputs.token_ids(prompt, model, received.client)
        response: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self.pipeline.table.served_model(model).max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }

        text = self.pipeline.profiles.of(model).text

        def spelled() -> list[str]:
            return [text.token(token_id).text for token_id in token_ids]

        if body.return_token_strs:
            response["token_strs"] = await received.run(spelled)
        return await _response(received, response)

    async def detokenize(self, request: Request) -> Response:
        async with receiving(request, self.scopes, self.bodies) as received:
            fields = await received.fields()
            body = await received.run(partial(openai_body, fields, DetokenizeBody))
            model, inputs = self.pipeline.table.find_model(body.model), self.pipeline.inputs
            inputs.check_model(model)
            token_ids = tuple(body.tokens)
            text = await inputs.text(token_ids, model, received.client, skip_special_tokens=False)
            return await _response(received, {"prompt": text})


def _chat_to_tokenize(fields: Mapping[str, Any]) -> tuple[TokenizeChatBody, ChatPrompt]:
    body = openai_body(fields, TokenizeChatBody)
    return body, chat_from(messages_from(body.messages), body, body.tools)


async def _response(received: ReceivedBody, response: Json) -> Response:
    """Encode a response whose size is proportional to the request's."""
    content = await received.run(partial(as_json, response))
    return Response(content, media_type="application/json")


@dataclass(frozen=True, slots=True)
class PrefixCacheEndpoint:
    orders: NodeOrders
    bodies: Bodies

    async def reset(self, request: Request) -> Response:
        """Reset the prefix caches of all nodes. Without a body, all their tiers."""
        shown = request.headers.get(HEADER)
        async with self.bodies.receive(request) as received:
            body = openai_body(await received.fields() if received.raw else {}, ResetBody)
        resets = await self.orders.reset_prefix_caches(
            body.tiers, shown, reset_running=body.reset_running
        )
        return JSONResponse({"nodes": [asdict(reset) for reset in resets]})
