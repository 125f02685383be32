"""Requests of a chaos run, and the check of answers against reference answers."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.bench.serve.load import FIRST_PLAIN_TOKEN
from baton.client import Answer, AsyncClient, Generation
from baton.core.sampling import SamplingParams
from baton.rpc.errors import ServiceError

MIN_TOKENS, MAX_TOKENS = 8, 96
MIN_PROMPT_LEN, MAX_PROMPT_LEN = 4, 160
# Tolerance of logprobs: the order of summation differs between batches.
LOGPROB_TOLERANCE = 1e-2
STOP_CHARACTERS = 4


class UnstableAnswer(ServiceError):
    """The same request got two different answers without faults."""


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """One request. Its prompt contains the tag, so that answers cannot be confused."""

    tag: int
    kind: str
    prompt: tuple[int, ...]
    generation: Generation


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    request: ChaosRequest
    answer: Answer


async def draw_requests(client: AsyncClient, seed: int, count: int) -> list[ChaosRequest]:
    """Return the requests, deterministic for a seed and a model."""
    vocab_size = (await client.model()).vocab_size
    draw = random.Random(seed)
    return [_draw_request(draw, tag, vocab_size) for tag in range(count)]


def _draw_request(draw: random.Random, tag: int, vocab_size: int) -> ChaosRequest:
    plain = range(FIRST_PLAIN_TOKEN, vocab_size)
    length = round(MIN_PROMPT_LEN * (MAX_PROMPT_LEN / MIN_PROMPT_LEN) ** draw.random())
    tagged = (plain[tag % len(plain)], plain[tag // len(plain) % len(plain)])
    prompt = (*tagged, *draw.choices(plain, k=length))
    max_tokens = draw.randint(MIN_TOKENS, MAX_TOKENS)
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    seeded = replace(greedy, temperature=0.8, top_p=0.95, seed=draw.getrandbits(32))
    kinds = {
        "greedy": greedy,
        "seeded": seeded,
        "penalties": replace(seeded, frequency_penalty=0.5, repetition_penalty=1.2),
        "logprobs": replace(seeded, logprobs=3),
        "stop": greedy,
    }
    kind = list(kinds)[tag % len(kinds)]
    return ChaosRequest(tag, kind, prompt, Generation(kinds[kind]))


async def reference_answers(
    client: AsyncClient, requests: Sequence[ChaosRequest]
) -> list[KnownAnswer]:
    """Return reference answers, generated alone. Raises UnstableAnswer if a batch gives others."""
    alone: list[KnownAnswer] = []
    for drawn in requests:
        answer = await client.generate(drawn.prompt, drawn.generation)
        request = drawn
        if drawn.kind == "stop":
            request = replace(drawn, generation=_stopped(drawn.generation, answer.text))
            answer = await client.generate(request.prompt, request.generation)
        alone.append(KnownAnswer(request, answer))
    batch = (client.generate(one.request.prompt, with_salt(one.request, "batch")) for one in alone)
    for one, answer in zip(alone, await asyncio.gather(*batch), strict=True):
        difference = difference_of(one, answer)
        if difference is not None:
            raise UnstableAnswer(f"request {one.request.tag} ({one.request.kind}): {difference}")
    return alone


def with_salt(request: ChaosRequest, salt: str) -> Generation:
    """Return the request with a cache salt: prompts of another salt share no cached KV."""
    return replace(request.generation, cache_salt=salt)


def _stopped(generation: Generation, text: str) -> Generation:
    """Return the request with a stop string from the middle of its answer."""
    middle = len(text) // 2
    stop = text[middle : middle + STOP_CHARACTERS]
    return replace(generation, stop=(stop,) if stop else ())


def difference_of(one: KnownAnswer, answer: Answer) -> str | None:
    """Return the difference to the reference answer, or None."""
    expected = one.answer
    if answer.token_ids != expected.token_ids:
        pairs = zip(answer.token_ids, expected.token_ids, strict=False)
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
        counts = f"{len(answer.token_ids)} tokens, expected {len(expected.token_ids)}"
        return f"tokens differ from index {index} on; {counts}"
    if answer.text != expected.text:
        return f"text is {answer.text!r}, expected {expected.text!r}"
    if answer.finish is None or expected.finish is None:
        return "no finish reason"
    for name in ("reason", "stop_token_id", "stop_string", "num_prompt_tokens"):
        actual, wanted = getattr(answer.finish, name), getattr(expected.finish, name)
        if actual != wanted:
            return f"{name} is {actual}, expected {wanted}"
    return _difference_of_logprobs(answer, expected)


def _difference_of_logprobs(answer: Answer, expected: Answer) -> str | None:
    if len(answer.logprobs) != len(expected.logprobs):
        return f"{len(answer.logprobs)} logprobs for {len(expected.logprobs)} tokens"
    for place, (actual, wanted) in enumerate(zip(answer.logprobs, expected.logprobs, strict=True)):
        is_close = math.isclose(actual.logprob, wanted.logprob, abs_tol=LOGPROB_TOLERANCE)
        if actual.token_id != wanted.token_id or len(actual.top) != len(wanted.top) or not is_close:
            return f"logprobs at index {place} are {actual}, expected {wanted}"
    return None
