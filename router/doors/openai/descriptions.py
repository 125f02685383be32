"""Descriptions of paths and bodies for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping

from baton.router.doors.openai.lora import LoadBody, UnloadBody
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
    RerankBody,
    ScoreBody,
)
from baton.router.http.openapi import Described

SCORE = Described("Score pairs of texts", (ScoreBody,))
RERANK = Described("Order documents by their relevance for a query", (RerankBody,))
DESCRIPTIONS: Mapping[str, Described] = {
    "/v1/completions": Described("Continue a prompt", (CompletionBody,)),
    "/v1/chat/completions": Described("Answer a chat", (ChatBody,)),
    "/v1/embeddings": Described("Embed texts", (EmbeddingBody,)),
    **dict.fromkeys(("/v1/score", "/score"), SCORE),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RERANK),
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
