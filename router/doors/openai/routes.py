"""Paths of OpenAI's API, with vLLM's additions."""

from __future__ import annotations

from collections.abc import Callable

from starlette.routing import Route

from baton.router.doors.openai.embeddings import Vectors
from baton.router.doors.openai.endpoints import Models, PrefixCacheEndpoint, Tokens
from baton.router.doors.openai.errors import OPENAI_ERRORS
from baton.router.doors.openai.generation import AnswerHandler, Read
from baton.router.doors.openai.lora import LoraEndpoints
from baton.router.doors.openai.request.parsed_request import chat_completion_from, completion_from
from baton.router.http.bodies import Bodies
from baton.router.http.exchange import Answer, GenerationEndpoint
from baton.router.orders.adapter_updates import AdapterUpdates
from baton.router.orders.node_orders import NodeOrders
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")  # of vLLM, and of Cohere's API


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
        *(_post(path, endpoint(vectors.score)) for path in ("/v1/score", "/score")),
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
