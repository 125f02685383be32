"""Requests of a chaos run that embed or rank texts, and the check of their answers."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.client import Served
from baton.core.vectors import Floats
from benchmarks.chaos.sending import EMBEDDER, ChaosRequest, Sending, WrongAnswer

# Tolerance of vectors and scores: the order of summation differs between batches and chunks.
TOLERANCE = 1e-3
WHOLE_CONTEXT = -1  # cut texts that are longer than the model's context


class _Pooled:
    """Base of the requests for vectors and scores."""

    __slots__ = ()

    def refined(self, answer: Any) -> ChaosRequest:
        found: Any = self
        request: ChaosRequest = found
        return request

    def served(self, answer: Any) -> Served | None:
        return None


@dataclass(frozen=True, slots=True)
class ChatModelEmbeddings(_Pooled):
    """Prompts that the chat model embeds, over gRPC. Implements `ChaosRequest`."""

    tag: int
    kind: str
    prompts: tuple[tuple[int, ...], ...]

    async def send(self, sending: Sending) -> list[Floats]:
        router = sending.router
        found = await router.client.embed(
            self.prompts,
            model=router.chat_model,
            cache_salt=sending.salt,
            timeout_s=sending.timeout_s,
        )
        return [np.array(each, np.float32) for each in found]

    def difference(self, answer: list[Floats], expected: list[Floats]) -> str | None:
        return difference_of_vectors(answer, expected)


@dataclass(frozen=True, slots=True)
class Embeddings(_Pooled):
    """Texts that the embedder embeds, over HTTP. Implements `ChaosRequest`."""

    tag: int
    kind: str
    texts: tuple[str, ...]

    async def send(self, sending: Sending) -> list[Floats]:
        is_encoded = bool(self.tag % 2)
        body = {
            "model": EMBEDDER,
            "input": self.texts,
            "encoding_format": "base64" if is_encoded else "float",
            "truncate_prompt_tokens": WHOLE_CONTEXT,
        }
        data = (await sending.post("/v1/embeddings", body))["data"]
        if [each["index"] for each in data] != list(range(len(self.texts))):
            raise WrongAnswer("the embeddings are out of order")
        vectors = [each["embedding"] for each in data]
        if is_encoded:
            return [np.frombuffer(base64.b64decode(each), "<f4") for each in vectors]
        return [np.array(each, np.float32) for each in vectors]

    def difference(self, answer: list[Floats], expected: list[Floats]) -> str | None:
        return difference_of_vectors(answer, expected)


@dataclass(frozen=True, slots=True)
class Ranking(_Pooled):
    """Documents that the embedder ranks, over HTTP. Implements `ChaosRequest`."""

    tag: int
    kind: str
    query: str
    documents: tuple[str, ...]

    async def send(self, sending: Sending) -> dict[int, float]:
        """Return the score of each document."""
        body = {
            "model": EMBEDDER,
            "query": self.query,
            "documents": self.documents,
            "truncate_prompt_tokens": WHOLE_CONTEXT,
        }
        results = (await sending.post("/v1/rerank", body))["results"]
        scores = [each["relevance_score"] for each in results]
        if scores != sorted(scores, reverse=True):
            raise WrongAnswer(f"scores are not in order: {scores}")
        if any(self.documents[each["index"]] != each["document"]["text"] for each in results):
            raise WrongAnswer("a document is another one than its index says")
        return {each["index"]: each["relevance_score"] for each in results}

    def difference(self, answer: dict[int, float], expected: dict[int, float]) -> str | None:
        if answer.keys() != expected.keys():
            return f"scores of documents {sorted(answer)}, expected {sorted(expected)}"
        for index, score in expected.items():
            if not math.isclose(answer[index], score, abs_tol=TOLERANCE):
                return f"the score of document {index} is {answer[index]}, expected {score}"
        return None


def difference_of_vectors(answer: Sequence[Floats], expected: Sequence[Floats]) -> str | None:
    """Return the difference between vectors of texts, or None."""
    if len(answer) != len(expected):
        return f"{len(answer)} vectors, expected {len(expected)}"
    for index, (found, wanted) in enumerate(zip(answer, expected, strict=True)):
        if found.shape != wanted.shape:
            return f"vector {index} has {found.size} numbers, expected {wanted.size}"
        distance = float(np.abs(found - wanted).max())
        if not distance <= TOLERANCE:
            return f"vector {index} differs by {distance:.2g}"
    return None
