"""Paths of OpenAI's API, with vLLM's additions, and descriptions for the OpenAPI document."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from baton.core.ids import ModelVariant
from baton.router.doors.openai.embeddings import Vectors
from baton.router.doors.openai.errors import OPENAI_ERRORS
from baton.router.doors.openai.generation import AnswerHandler, Read
from baton.router.doors.openai.request.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResetBody,
    TokenizeChatBody,
    TokenizeTextBody,
    openai_body,
)
from baton.router.doors.openai.request.embedding_bodies import (
    EmbeddingBody,
    PoolBody,
    RerankBody,
    ScoreBody,
)
from baton.router.doors.openai.request.parsed_request import chat_completion_from, completion_from
from baton.router.doors.openai.request.prompts import chat_from, messages_from
from baton.router.http.bodies import (
    Bodies,
    ReceivedBody,
    result_while_connected,
    run_while_connected,
)
from baton.router.http.exchange import Answer, GenerationEndpoint, receiving
from baton.router.http.json_encoding import Json, as_json
from baton.router.http.openapi import Described
from baton.router.orders.adapter_updates import AdapterOrder, AdapterUpdates
from baton.router.orders.node_orders import NodeOrders
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes
from baton.router.values import ChatPrompt, Prompt, TextPrompt
from baton.rpc.errors import UnknownModel
from baton.rpc.security.token import HEADER


class LoadBody(Body):
    lora_name: str
    lora_path: str
    load_inplace: bool = False  # replaces an adapter of this name
    model: str = ""  # Baton's own: the base, where there are several


class UnloadBody(Body):
    lora_name: str
    lora_int_id: int | None = None  # ignored, as in vLLM


@dataclass(frozen=True, slots=True)
class LoraEndpoints:
    """Endpoints that load and unload adapters, with vLLM's fields."""

    adapters: AdapterUpdates
    bodies: Bodies

    async def load(self, request: Request) -> Response:
        async with self.bodies.receive(request) as received:
            body = openai_body(await received.fields(), LoadBody)
        order = AdapterOrder(body.lora_name, body.lora_path, body.model, body.load_inplace)
        update = self.adapters.load(order, request.headers.get(HEADER))
        await run_while_connected(request.receive, update)
        return _success(body.lora_name, "added")

    async def unload(self, request: Request) -> Response:
        async with self.bodies.receive(request) as received:
            body = openai_body(await received.fields(), UnloadBody)
        update = self.adapters.unload(body.lora_name, request.headers.get(HEADER))
        await run_while_connected(request.receive, update)
        return _success(body.lora_name, "removed")


def _success(name: str, done: str) -> Response:
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {done} successfully.")


SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")  # of vLLM, and of Cohere's API
SCORE = Described("Score pairs of texts", (ScoreBody,))
RERANK = Described("Order documents by their relevance for a query", (RerankBody,))
DESCRIPTIONS: Mapping[str, Described] = {
    "/v1/completions": Described("Continue a prompt", (CompletionBody,)),
    "/v1/chat/completions": Described("Answer a chat", (ChatBody,)),
    "/v1/embeddings": Described("Embed texts", (EmbeddingBody,)),
    "/pooling": Described("Return vectors of the tokens of texts, or of texts", (PoolBody,)),
    **dict.fromkeys(SCORE_PATHS, SCORE),
    **dict.fromkeys(RERANK_PATHS, RERANK),
    "/v1/models": Described("List models and adapters"),
    "/v1/models/{model}": Described("Return one model or adapter"),
    "/tokenize": Described("Tokenize a text or a chat", (TokenizeTextBody, TokenizeChatBody)),
    "/detokenize": Described("Return the text of token ids", (DetokenizeBody,)),
    "/v1/load_lora_adapter": Described("Load an adapter; for operators", (LoadBody,)),
    "/v1/unload_lora_adapter": Described("Unload an adapter; for operators", (UnloadBody,)),
    "/reset_prefix_cache": Described("Reset prefix caches; for operators", (ResetBody,)),
    "/live": Described("Probe: the process is alive"),
    "/health": Described("Probe: the router takes requests"),
    "/ready": Described("Probe: the router takes requests"),
    "/ping": Described("Probe: the router takes requests"),
    "/load": Described("Return the number of requests that wait or are computed"),
    "/metrics": Described("Return metrics for Prometheus"),
    "/version": Described("Return Baton's version"),
}


def openai_routes(
    pipeline: Pipeline,
    scopes: RequestScopes,
    bodies: Bodies,
    orders: NodeOrders,
    adapters: AdapterUpdates,
    *,
    embed_truncate: bool,
) -> list[Route]:
    def generation(read: Read) -> GenerationEndpoint:
        return endpoint(AnswerHandler(pipeline, read).answer)

    def endpoint(answer: Answer) -> GenerationEndpoint:
        return GenerationEndpoint(scopes, bodies, OPENAI_ERRORS, answer)

    models, texts = Models(pipeline), Tokens(pipeline, scopes, bodies)
    vectors, loras = Vectors(pipeline, embed_truncate), LoraEndpoints(adapters, bodies)
    return [
        _post("/v1/completions", generation(completion_from)),
        _post("/v1/chat/completions", generation(chat_completion_from)),
        _post("/v1/embeddings", endpoint(vectors.embed)),
        _post("/pooling", endpoint(vectors.pool)),
        *(_post(path, endpoint(vectors.score)) for path in SCORE_PATHS),
        *(_post(path, endpoint(vectors.rerank)) for path in RERANK_PATHS),
        Route("/v1/models", models.list_all),
        Route("/v1/models/{model:path}", models.show),
        _post("/tokenize", texts.tokenize),
        _post("/detokenize", texts.detokenize),
        _post("/v1/load_lora_adapter", loras.load),
        _post("/v1/unload_lora_adapter", loras.unload),
        _post("/reset_prefix_cache", PrefixCacheEndpoint(orders, bodies).reset),
    ]


def _post(path: str, endpoint: Callable[..., object]) -> Route:
    return Route(path, endpoint, methods=["POST"])


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
            body, prompt = await received.run(partial(_chat_to_tokenize, fields))
        else:
            body = openai_body(fields, TokenizeTextBody)
            prompt = TextPrompt(body.prompt, body.add_special_tokens)
        model = self.pipeline.table.find_model(body.model)
        self.pipeline.inputs.check_model(model)
        client = received.client
        prompt = await self.pipeline.read_files(prompt, model, client, received.hold_more)
        token_ids = await self.pipeline.inputs.token_ids(prompt, model, client)
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
