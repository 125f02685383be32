"""Requests of a chaos run, drawn from a table of kinds, and their reference answers."""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.bench.load import FIRST_PLAIN_TOKEN
from baton.client import Generation
from baton.core.sampling import SamplingParams
from baton.rpc.errors import ServiceError
from benchmarks.chaos.adapted_text import AdapterChoice, with_model
from benchmarks.chaos.adapter_folders import NAMES
from benchmarks.chaos.generated_text import GeneratedText
from benchmarks.chaos.pooled_text import ChatModelEmbeddings, Embeddings, Ranking
from benchmarks.chaos.sending import ChaosRequest, Router, Sending

MIN_TOKENS, MAX_TOKENS = 8, 96
MIN_PROMPT_LEN, MAX_PROMPT_LEN = 4, 160
MAX_TEXTS = 6
MAX_WORDS = 30
MAX_TOGETHER = 200  # requests of the reference run


class UnstableAnswer(ServiceError):
    """The same request got two different answers without faults."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    request: ChaosRequest
    answer: Any


@dataclass(frozen=True, slots=True)
class Drawing:
    """Tag and kind of a request, and what its content is drawn from."""

    tag: int
    kind: str
    draw: random.Random
    plain: range  # tokens without a special meaning

    def prompt(self) -> tuple[int, ...]:
        """Return tokens that begin with the tag."""
        length = round(MIN_PROMPT_LEN * (MAX_PROMPT_LEN / MIN_PROMPT_LEN) ** self.draw.random())
        plain, tag = self.plain, self.tag
        tagged = (plain[tag % len(plain)], plain[tag // len(plain) % len(plain)])
        return (*tagged, *self.draw.choices(plain, k=length))

    def text(self) -> str:
        """Return words that begin with the tag."""
        count = self.draw.randint(1, MAX_WORDS)
        words = ("".join(self.draw.choices(string.ascii_lowercase, k=5)) for _ in range(count))
        return " ".join((str(self.tag), *words))

    def num_texts(self) -> int:
        return self.draw.randint(1, MAX_TEXTS)


Draw = Callable[[Drawing], ChaosRequest]


def _generated(
    *, needs_stop: bool = False, needs_prediction: bool = False, **sampling: Any
) -> Callable[[Drawing], GeneratedText]:
    """Return a maker of requests that generate text, greedily or with these settings."""

    def draw(drawing: Drawing) -> GeneratedText:
        prompt, random_ = drawing.prompt(), drawing.draw
        max_tokens, seed = random_.randint(MIN_TOKENS, MAX_TOKENS), random_.getrandbits(32)
        settings = {"temperature": 0.0, **({"seed": seed, **sampling} if sampling else {})}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)
        return GeneratedText(
            *(drawing.tag, drawing.kind, prompt, Generation(params)),
            needs_stop=needs_stop,
            needs_prediction=needs_prediction,
        )

    return draw


def _adapted(drawing: Drawing) -> ChaosRequest:
    return with_model(_generated()(drawing), drawing.draw.choice(NAMES))


def _reloaded(drawing: Drawing) -> ChaosRequest:
    return AdapterChoice(_generated()(drawing))


def _chat_model_embeddings(drawing: Drawing) -> ChaosRequest:
    prompts = tuple(drawing.prompt() for _ in range(drawing.num_texts()))
    return ChatModelEmbeddings(drawing.tag, drawing.kind, prompts)


def _embeddings(drawing: Drawing) -> ChaosRequest:
    texts = tuple(drawing.text() for _ in range(drawing.num_texts()))
    return Embeddings(drawing.tag, drawing.kind, texts)


def _ranking(drawing: Drawing) -> ChaosRequest:
    documents = tuple(drawing.text() for _ in range(drawing.num_texts()))
    return Ranking(drawing.tag, drawing.kind, drawing.text(), documents)


SEEDED: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.95}
# Kinds take turns. Another kind is a line here, and an implementation of `ChaosRequest`.
KINDS: Mapping[str, Draw] = {
    "greedy": _generated(),
    "embed": _chat_model_embeddings,
    "seeded": _generated(**SEEDED),
    "encode": _embeddings,
    "penalties": _generated(**SEEDED, frequency_penalty=0.5, repetition_penalty=1.2),
    "logprobs": _generated(**SEEDED, logprobs=3),
    "adapter": _adapted,
    "rerank": _ranking,
    "reloaded": _reloaded,
    "stop": _generated(needs_stop=True),
    "predicted": _generated(needs_prediction=True),
}


async def draw_requests(
    router: Router,
    seed: int,
    count: int,
    further: Mapping[str, Draw] | None = None,
    further_share: float = 0.0,
) -> list[ChaosRequest]:
    """Return the requests, deterministic for a seed and a model.

    A share of them is of `further` kinds.
    """
    vocab_size = (await router.client.model(router.chat_model)).vocab_size
    draw, plain = random.Random(seed), range(FIRST_PLAIN_TOKEN, vocab_size)
    tables = (KINDS, further or {})
    turns, requests = [0, 0], list[ChaosRequest]()
    for tag in range(count):
        which = int((tag + 1) * further_share) - int(tag * further_share)
        table = tables[which]
        kind = list(table)[turns[which] % len(table)]
        turns[which] += 1
        requests.append(table[kind](Drawing(tag, kind, draw, plain)))
    return requests


async def reference_answers(router: Router, requests: Sequence[ChaosRequest]) -> list[KnownAnswer]:
    """Return reference answers, computed alone. Raises UnstableAnswer if a batch gives others."""
    alone: list[KnownAnswer] = []
    for drawn in requests:
        answer = await drawn.send(Sending(router))
        request = drawn.refined(answer)
        if request is not drawn:
            answer = await request.send(Sending(router))
        alone.append(KnownAnswer(request, answer))
    together, turns = replace(Sending(router), salt="batch"), asyncio.Semaphore(MAX_TOGETHER)

    async def send(request: ChaosRequest) -> Any:
        async with turns:
            return await request.send(together)

    answers = await asyncio.gather(*(send(one.request) for one in alone))
    for one, answer in zip(alone, answers, strict=True):
        difference = one.request.difference(answer, one.answer)
        if difference is not None:
            raise UnstableAnswer(f"request {one.request.tag} ({one.request.kind}): {difference}")
    return alone
