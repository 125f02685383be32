"""What clients ask in a run with faults, and how an answer is judged. Pure where it judges."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.bench.serve_load import FIRST_PLAIN_TOKEN
from baton.client import Answer, AsyncClient, Generation
from engine.sampling import SamplingParams
from serving.errors import ServiceError

LEAST_TOKENS, MOST_TOKENS = 8, 96
LEAST_PROMPT, MOST_PROMPT = 4, 160
# How far apart two runs of the same sums may be: their order is another in another batch.
LOGPROB_TOLERANCE = 1e-2
STOP_CHARACTERS = 4


class NotSteady(ServiceError):
    """The same request got two answers, though nothing had gone wrong yet."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; its tag is in its prompt, so that no answer can be taken for another's."""

    tag: int
    kind: str
    prompt: tuple[int, ...]
    generation: Generation


@dataclass(frozen=True, slots=True)
class Known:
    ask: Ask
    answer: Answer


async def asks(client: AsyncClient, seed: int, count: int) -> list[Ask]:
    """Same seed, same requests for the same model."""
    vocab_size = (await client.model()).vocab_size
    draw = random.Random(seed)
    return [_ask(draw, tag, vocab_size) for tag in range(count)]


def _ask(draw: random.Random, tag: int, vocab_size: int) -> Ask:
    plain = range(FIRST_PLAIN_TOKEN, vocab_size)
    length = round(LEAST_PROMPT * (MOST_PROMPT / LEAST_PROMPT) ** draw.random())
    tagged = (plain[tag % len(plain)], plain[tag // len(plain) % len(plain)])
    prompt = (*tagged, *draw.choices(plain, k=length))
    max_tokens = draw.randint(LEAST_TOKENS, MOST_TOKENS)
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
    return Ask(tag, kind, prompt, Generation(kinds[kind]))


async def known(client: AsyncClient, to_ask: Sequence[Ask]) -> list[Known]:
    """Each asked alone, and then all at once. Raises NotSteady, for then nothing can be judged."""
    alone: list[Known] = []
    for ask in to_ask:
        answer = await client.generate(ask.prompt, ask.generation)
        if ask.kind == "stop":
            ask = replace(ask, generation=_stopped(ask.generation, answer.text))  # noqa: PLW2901
            answer = await client.generate(ask.prompt, ask.generation)
        alone.append(Known(ask, answer))
    crowd = (client.generate(one.ask.prompt, salted(one.ask, "crowd")) for one in alone)
    for one, answer in zip(alone, await asyncio.gather(*crowd), strict=True):
        difference = difference_of(one, answer)
        if difference is not None:
            raise NotSteady(f"request {one.ask.tag} ({one.ask.kind}): {difference}")
    return alone


def salted(ask: Ask, salt: str) -> Generation:
    """Prompts of another salt share no cached KV: it has to be computed and handed over again."""
    return replace(ask.generation, cache_salt=salt)


def _stopped(generation: Generation, text: str) -> Generation:
    """To end in the middle of what it would say."""
    middle = len(text) // 2
    stop = text[middle : middle + STOP_CHARACTERS]
    return replace(generation, stop=(stop,) if stop else ())


def difference_of(one: Known, answer: Answer) -> str | None:
    """What is wrong with an answer."""
    right = one.answer
    if answer.token_ids != right.token_ids:
        pairs = zip(answer.token_ids, right.token_ids, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
        counts = f"{len(answer.token_ids)} tokens came, {len(right.token_ids)} are right"
        return f"tokens differ from place {place} on; {counts}"
    if answer.text != right.text:
        return f"the text is {answer.text!r}, not {right.text!r}"
    if answer.finish is None or right.finish is None:
        return "there is no end"
    for name in ("reason", "stop_token_id", "stop_string", "num_prompt_tokens"):
        if getattr(answer.finish, name) != getattr(right.finish, name):
            return f"{name} is {getattr(answer.finish, name)}, not {getattr(right.finish, name)}"
    return _difference_of_logprobs(answer, right)


def _difference_of_logprobs(answer: Answer, right: Answer) -> str | None:
    if len(answer.logprobs) != len(right.logprobs):
        return f"{len(answer.logprobs)} logprobs came for {len(right.logprobs)} tokens"
    for place, (mine, its) in enumerate(zip(answer.logprobs, right.logprobs, strict=True)):
        is_close = math.isclose(mine.logprob, its.logprob, abs_tol=LOGPROB_TOLERANCE)
        if mine.token_id != its.token_id or len(mine.top) != len(its.top) or not is_close:
            return f"the logprobs at place {place} are {mine}, not {its}"
    return None
