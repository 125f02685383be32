"""Embeddings, pooling, scores and reranking: OpenAI's API, with those of vLLM and Cohere."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from baton.core.errors import InvalidRequest
from baton.core.ids import ModelVariant
from baton.core.request import EMBED, TOKEN_EMBED, EmbedTask
from baton.core.vectors import Floats, check_dimensions, shorten
from baton.router.answers import MAX_INPUTS, calls_for_texts
from baton.router.doors.openai.request.bodies import openai_body
from baton.router.doors.openai.request.embedding_bodies import (
    EmbeddingBody,
    PoolBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from baton.router.doors.openai.request.prompts import parse_prompts
from baton.router.embeddings import EmbeddedText, embed_texts
from baton.router.http.bodies import ReceivedBody
from baton.router.http.exchange import ReceivedRequest, Reply
from baton.router.http.json_encoding import Json, LazyArray, encode_in_slices
from baton.router.input_processing.limits import check_count
from baton.router.pipeline import Pipeline
from baton.router.routing.served_models import ServedModel
from baton.router.values import PairPrompt, Prompt, TextPrompt
from baton.rpc.errors import NoNodes

Item = TypeVar("Item")
WHOLE_CONTEXT = -1  # value of truncate_prompt_tokens
NUMBER_BYTES = 24  # of a number of a vector and of its JSON
MAX_SIMILARITIES = 1 << 20  # of tokens, in memory at once


@dataclass(frozen=True, slots=True)
class Vectors:
    """Endpoints for a model that embeds or classifies texts."""

    pipeline: Pipeline
    embed_truncate: bool  # longer texts than a model takes that generates none

    async def embed(self, request: ReceivedRequest, reply: Reply) -> None:
        await self._embed(request, reply, EmbeddingBody)

    async def pool(self, request: ReceivedRequest, reply: Reply) -> None:
        """Return a vector of each token of texts, or what `embed` returns, in vLLM's format."""
        await self._embed(request, reply, PoolBody)

    async def _embed(
        self, request: ReceivedRequest, reply: Reply, kind: type[EmbeddingBody]
    ) -> None:
        with request.scope.ending_on_error():
            fields = await request.body.fields()
            body = await request.body.run(partial(openai_body, fields, kind))
            texts = await request.body.run(partial(_texts_of, body))
            model = self._model(body)
            self._check_dimensions(body, model)
            task = self._task(body, model)
        found = await self._run(request, body, model, texts, task)
        encode = _encode_base64 if body.encoding_format == "base64" else _encode_numbers
        name, prefix, field = ("embedding", "embd", "embedding")
        if isinstance(body, PoolBody):
            name, prefix, field = ("pooling", "pool", "data")
        data = (
            {
                "object": name,
                "index": index,
                field: encode(shorten(text.vector, body.dimensions)),
            }
            for index, text in enumerate(found)
        )
        result = {"data": LazyArray(data, has_long_items=task is TOKEN_EMBED)}
        await self._send(reply, request, body, model, prefix, result, found)

    async def score(self, request: ReceivedRequest, reply: Reply) -> None:
        """Score pairs of texts, in order; a single first text is paired with all second ones."""
        with request.scope.ending_on_error():
            fields = await request.body.fields()
            body = await request.body.run(partial(openai_body, fields, ScoreBody))
            model = self._model(body)
            firsts, seconds = _as_list(body.text_1), _as_list(body.text_2)
            if len(firsts) not in (1, len(seconds)):
                raise InvalidRequest(
                    f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}: send one text_1, "
                    "or as many of each",
                    "text_1",
                )
        scores, found = await self._score(request, body, model, firsts, seconds)
        data = [
            {"object": "score", "index": index, "score": score}
            for index, score in enumerate(scores)
        ]
        await self._send(reply, request, body, model, "score", {"data": data}, found)

    async def rerank(self, request: ReceivedRequest, reply: Reply) -> None:
        """Return the documents with the highest scores first."""
        with request.scope.ending_on_error():
            fields = await request.body.fields()
            body = await request.body.run(partial(openai_body, fields, RerankBody))
            model = self._model(body)
            documents = [_text_of(document) for document in body.documents]
        scores, found = await self._score(request, body, model, [body.query], documents)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[Json] = []
        for index in order[: body.top_n or None]:
            result: Json = {"index": index, "relevance_score": scores[index]}
            if body.return_documents:
                result["document"] = {"text": documents[index]}
            results.append(result)
        await self._send(reply, request, body, model, "rerank", {"results": results}, found)

    async def _score(
        self,
        request: ReceivedRequest,
        body: PoolingBody,
        model: ModelVariant,
        firsts: Sequence[str],
        seconds: Sequence[str],
    ) -> tuple[list[float], list[EmbeddedText]]:
        """Return a score of each pair.

        It is that of a classifier, the cosine of embeddings, or of models that give vectors of
        tokens alone, MaxSim.
        """
        with request.scope.ending_on_error():
            served = self._served(model)
        if served.has_labels:
            if served.vector_size != 1:
                raise InvalidRequest(
                    f"this model has scores for {served.vector_size} labels; scores of pairs need "
                    "a model with one, or an embedder",
                    "model",
                )
            pairs = zip(_repeated(firsts, len(seconds)), seconds, strict=True)
            found = await self._run(request, body, model, [PairPrompt(*pair) for pair in pairs])
            return [float(text.vector[0]) for text in found], found
        texts = [TextPrompt(text) for text in (*firsts, *seconds)]
        task = TOKEN_EMBED if served.pools_tokens else EMBED
        found = await self._run(request, body, model, texts, task)
        left, right = found[: len(firsts)], found[len(firsts) :]
        scores = [
            await _similarity(request.body, one.vector, other.vector)
            for one, other in zip(_repeated(left, len(right)), right, strict=True)
        ]
        return scores, found

    async def _run(
        self,
        request: ReceivedRequest,
        body: PoolingBody,
        model: ModelVariant,
        texts: Sequence[Prompt],
        task: EmbedTask = EMBED,
    ) -> list[EmbeddedText]:
        with request.scope.ending_on_error():
            calls = calls_for_texts(
                request.id,
                texts,
                model,
                max_tokens=self._max_tokens(body, model),
                priority=body.priority,
                cache_salt=body.cache_salt,
                task=task,
            )

        def hold(num_bytes: int) -> None:
            request.body.lease.add(NUMBER_BYTES * num_bytes // 4)

        return await embed_texts(self.pipeline, request.scope, calls, hold)

    def _task(self, body: EmbeddingBody, model: ModelVariant) -> EmbedTask:
        """Return the task of a body. Raises InvalidRequest if the model cannot do it."""
        if not isinstance(body, PoolBody):
            return EMBED
        has_labels = self.pipeline.table.served_model(model).has_labels
        if body.task is not None and has_labels != (body.task == "classify"):
            expected = "classify" if has_labels else "embed or token_embed"
            raise InvalidRequest(
                f"task is {body.task!r}; with this model it must be {expected}", "task"
            )
        return EMBED if has_labels or body.task == "embed" else TOKEN_EMBED

    def _max_tokens(self, body: PoolingBody, model: ModelVariant) -> int | None:
        """Return the length to which texts are cut, or None if longer ones are refused."""
        max_tokens = body.truncate_prompt_tokens
        if max_tokens == WHOLE_CONTEXT:
            return self._served(model).max_model_len
        served = self.pipeline.table.served_model(model)
        if max_tokens is None and self.embed_truncate and not served.generates:
            return served.max_model_len
        return max_tokens

    def _model(self, body: PoolingBody) -> ModelVariant:
        """Return the model of a request: the only one that embeds if it names none."""
        return self.pipeline.table.find_model(body.model, EMBED)

    def _served(self, model: ModelVariant) -> ServedModel:
        """Return the properties of a model. Raises UnknownModel, and NoNodes if none has them."""
        self.pipeline.inputs.check_model(model)
        if model.base not in self.pipeline.table.models:
            raise NoNodes("no node that serves this model is known at the moment; try again later")
        return self.pipeline.table.served_model(model)

    def _check_dimensions(self, body: EmbeddingBody, model: ModelVariant) -> None:
        """Refuse `dimensions` before anything is computed."""
        size = self.pipeline.table.served_model(model).vector_size
        if size:
            check_dimensions(body.dimensions, size)

    async def _send(
        self,
        reply: Reply,
        request: ReceivedRequest,
        body: PoolingBody,
        model: ModelVariant,
        prefix: str,
        result: Json,
        found: Sequence[EmbeddedText],
    ) -> None:
        num_tokens = sum(text.num_tokens for text in found)
        warnings = [*dict.fromkeys(warning for text in found for warning in text.warnings)]
        is_unexpected = warnings and body.truncate_prompt_tokens is None
        response = {
            "id": f"{prefix}-{request.id}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name or next(iter(self.pipeline.table.served.names), ""),
            **result,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            **({"warnings": warnings} if is_unexpected else {}),
        }
        await reply.send_body(await encode_in_slices(response))


def _texts_of(body: EmbeddingBody) -> list[Prompt]:
    return parse_prompts(
        body.input,
        add_special_tokens=body.add_special_tokens,
        field="input",
        max_prompts=MAX_INPUTS,
    )


def _as_list(texts: str | list[str]) -> list[str]:
    listed = [texts] if isinstance(texts, str) else texts
    check_count("text_2", len(listed), MAX_INPUTS)
    return listed


def _repeated(items: Sequence[Item], count: int) -> list[Item]:
    """Return the items, a single one repeated."""
    return [*items] * count if len(items) == 1 else [*items]


def _text_of(document: str | dict[str, Any]) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str):
        raise InvalidRequest("documents must be texts, or objects with the field text", "documents")
    return text


async def _similarity(body: ReceivedBody, one: Floats, other: Floats) -> float:
    """Return the cosine of two embeddings, or MaxSim of two texts with vectors of their tokens.

    The similarities of a large text's tokens are computed in parts, between which other clients
    have turns. Raises QueueFull.
    """
    if one.ndim == 1:
        return await body.compute(one.size, partial(_cosine, one, other))
    num_rows = max(1, MAX_SIMILARITIES // len(other))
    total = 0.0
    for start in range(0, len(one), num_rows):
        rows = one[start : start + num_rows]
        total += await body.compute(rows.size * len(other), partial(_max_sim, rows, other))
    return total


def _cosine(one: Floats, other: Floats) -> float:
    lengths = float((one @ one) * (other @ other)) ** 0.5
    return float(one @ other) / lengths if lengths else 0.0


def _max_sim(query: Floats, document: Floats) -> float:
    """Return the sum over the query's tokens of the largest similarity with a document's token."""
    return float((query @ document.T).max(axis=1).sum())


def _encode_numbers(vector: Floats) -> list[float] | LazyArray:
    if vector.ndim == 2:
        return LazyArray(map(_encode_numbers, vector))
    numbers: list[float] = vector.tolist()
    return numbers


def _encode_base64(vector: Floats) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
