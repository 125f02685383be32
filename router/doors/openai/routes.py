"""Paths of OpenAI's API, with vLLM's additions, and descriptions for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.routing import Route

from baton.router.doors.openai.embeddings import Vectors
from baton.router.doors.openai.endpoints import Models, PrefixCacheEndpoint, Tokens
from baton.router.doors.openai.errors import OPENAI_ERRORS
from baton.router.doors.openai.generation import AnswerHandler, Read
from baton.router.doors.openai.lora import LoadBody, LoraEndpoints, UnloadBody
from baton.router.doors.openai.request.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResetBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from baton.router.doors.openai.request.embedding_bodies import (
    EmbeddingBody,
    PoolBody,
    RerankBody,
    ScoreBody,
)
from baton.router.doors.openai.request.parsed_request import chat_completion_from, completion_from
from baton.router.http.bodies import Bodies
from baton.router.http.exchange import Answer, GenerationEndpoint
from baton.router.http.openapi import Described
from baton.router.orders.adapter_updates import AdapterUpdates
from baton.router.orders.node_orders import NodeOrders
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes

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
