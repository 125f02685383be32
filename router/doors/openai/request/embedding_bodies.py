"""Pydantic models of the bodies of embeddings, pooling, scores and reranking. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from baton.router.answers import MAX_INPUTS
from baton.router.doors.openai.request.bodies import MAX_INT32, AnyInt, Body

Inputs = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Documents = Annotated[
    list[str | dict[str, Any]], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
]
Positive = Annotated[int, Field(ge=1, le=MAX_INT32)]


class PoolingBody(Body):
    """Fields common to all of them."""

    model: str = ""
    # -1: the model's context length.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    priority: AnyInt = 0
    cache_salt: str = ""


class EmbeddingBody(PoolingBody):
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None
    add_special_tokens: bool = True


class PoolBody(EmbeddingBody):
    # Without it: token_embed, or classify of a classifier.
    task: Literal["embed", "token_embed", "classify"] | None = None


class ScoreBody(PoolingBody):
    text_1: str | Inputs
    text_2: str | Inputs


class RerankBody(PoolingBody):
    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0, le=MAX_INT32)] = 0
    return_documents: bool = True
