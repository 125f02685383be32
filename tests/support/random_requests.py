"""Random requests with random combinations of parameters, and the answers of `baton.LLM` to them.

With native kernels, results do not depend on batch, chunks, history or drafts. So each request has
one correct answer, whichever nodes compute it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.client import Answer, Generation
from baton.completion import Completion
from baton.core.output import TokenLogprobs
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.llm import LLM

FORMS = (
    StructuredOutputs(regex="(yes|no|maybe)( [a-z]{1,6}){0,3}"),
    StructuredOutputs(choice=("return", "raise ValueError", "pass")),
    StructuredOutputs(regex="([a-f]{2}-){4,9}[0-9]"),
    StructuredOutputs(
        json='{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},'
        ' "size": {"type": "integer"}}, "required": ["name", "size"],'
        ' "additionalProperties": false}'
    ),
)
CHANGED_CHARACTERS = 3  # of a prediction, in its middle


@dataclass(frozen=True, slots=True)
class RequestWorld:
    """Limits and names from which random requests are drawn."""

    max_model_len: int
    tokens: range  # without a special meaning
    adapters: tuple[str, ...] = ()
    max_prompt_len: int = 400  # of most requests


@dataclass(frozen=True, slots=True)
class RandomRequest:
    prompt: tuple[int, ...]
    generation: Generation

    @property
    def samplings(self) -> list[SamplingParams]:
        """Return the sampling parameters of the `n` answers: answer i uses the seed plus i."""
        sampling = self.generation.sampling
        assert isinstance(sampling, SamplingParams)
        assert sampling.seed is not None
        return [replace(sampling, seed=sampling.seed + i) for i in range(self.generation.n)]

    def predicting(self, text: str) -> RandomRequest:
        """Return the request with a prediction: an answer with a few characters changed."""
        middle = len(text) // 2
        changed = text[:middle] + "?" * CHANGED_CHARACTERS + text[middle + CHANGED_CHARACTERS :]
        return replace(self, generation=replace(self.generation, prediction=changed))


def draw_requests(world: RequestWorld, seed: int, count: int) -> list[RandomRequest]:
    draw = random.Random(seed)
    longest = world.max_prompt_len
    prefixes = [draw.choices(world.tokens, k=draw.randint(16, longest)) for _ in range(6)]
    return [_draw_request(world, draw, prefixes) for _ in range(count)]


def _draw_request(
    world: RequestWorld, draw: random.Random, prefixes: Sequence[Sequence[int]]
) -> RandomRequest:
    shared = draw.choice(prefixes) if draw.random() < 0.5 else ()
    own = draw.choices(world.tokens, k=draw.choice([1, 3, 15, 16, 17, 40, 120]))
    if draw.random() < 0.3:  # something for the index of tokens to find
        own = own * 3
    prompt = (*shared, *own)
    longest = world.max_model_len
    if draw.random() < 0.05 or len(prompt) >= longest:
        prompt = (prompt * longest)[: longest - draw.randint(1, 8)]
    generation = Generation(
        _draw_sampling(draw, prompt, longest - len(prompt)),
        stop=draw.choice([(), (), (), (" ",), ("e", "\n\n"), ("self",)]),
        include_stop_in_output=draw.random() < 0.3,
        n=draw.choice([1, 1, 1, 1, 2, 3]),
        model=draw.choice(world.adapters) if world.adapters and draw.random() < 0.2 else "",
        cache_salt="own" if draw.random() < 0.1 else "",
        priority=draw.choice([0, 0, 0, 1]),
    )
    return RandomRequest(prompt, generation)


def _draw_sampling(draw: random.Random, prompt: Sequence[int], room: int) -> SamplingParams:
    form = draw.choice(FORMS) if draw.random() < 0.2 else None
    max_tokens = min(room, draw.choice([1, 2, 8, 24, 60]))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=draw.choice([0.0, 0.8]),
        seed=draw.getrandbits(31),
        ignore_eos=form is None and draw.random() < 0.5,
        structured_outputs=form,
        logprobs=draw.choice([None, None, 0, 3]),
        prompt_logprobs=draw.choice([None, None, None, None, None, None, None, 2]),
    )
    for share, is_free, fields in PARAMETERS:
        if draw.random() < share and (form is None or not is_free):
            sampling = replace(sampling, **fields(draw, prompt, max_tokens))
    return sampling


DrawFields = Callable[[random.Random, Sequence[int], int], dict[str, Any]]
# Share of the requests, whether it excludes a form, and the fields that are drawn.
PARAMETERS: Sequence[tuple[float, bool, DrawFields]] = (
    (0.2, False, lambda draw, *_: {"top_p": draw.choice([0.5, 0.9])}),
    (0.1, False, lambda draw, *_: {"top_k": draw.choice([1, 5, 40])}),
    (0.1, False, lambda draw, *_: {"min_p": draw.choice([0.01, 0.2])}),
    (0.2, False, lambda draw, *_: {"repetition_penalty": draw.choice([0.8, 1.2])}),
    (0.1, False, lambda draw, *_: {"frequency_penalty": draw.choice([-0.5, 0.3])}),
    (0.1, False, lambda draw, *_: {"presence_penalty": draw.choice([-0.5, 0.3])}),
    (
        0.15,
        False,
        lambda draw, prompt, _: {
            "logit_bias": {token: draw.choice([-5.0, 3.0]) for token in draw.choices(prompt, k=4)}
        },
    ),
    # Few tokens repeat, so that some drafts are accepted and others are not. One of them is never
    # banned.
    (
        0.2,
        True,
        lambda draw, prompt, _: {
            "allowed_token_ids": (*draw.choices(prompt, k=4), min(prompt) - 1)
        },
    ),
    (0.1, True, lambda draw, prompt, _: {"banned_token_ids": tuple(draw.choices(prompt, k=4))[1:]}),
    (
        0.1,
        True,
        lambda draw, prompt, _: {
            "banned_sequences": (tuple(draw.choices(prompt, k=2)), (prompt[-1],) * 3)
        },
    ),
    (0.15, True, lambda draw, prompt, _: {"stop_token_ids": tuple(draw.choices(prompt, k=2))}),
    (0.15, True, lambda draw, _, max_tokens: {"min_tokens": draw.randint(1, max_tokens)}),
)


def answers_alone(llm: LLM, requests: Sequence[RandomRequest]) -> list[list[Completion]]:
    """Group the requests by stop rule, since `LLM.generate` takes one per call."""
    places_by_rule = defaultdict(list)
    for place, request in enumerate(requests):
        generation = request.generation
        places_by_rule[generation.stop, generation.include_stop_in_output].append(place)
    answers: dict[int, list[Completion]] = {}
    for (stop, included), places in places_by_rule.items():
        flat = [
            (requests[place].prompt, one, requests[place].generation.model)
            for place in places
            for one in requests[place].samplings
        ]
        completions = iter(
            llm.generate(
                [prompt for prompt, _, _ in flat],
                [sampling for _, sampling, _ in flat],
                stop=stop,
                include_stop_in_output=included,
                lora=[adapter for _, _, adapter in flat],
            )
        )
        for place in places:
            answers[place] = [next(completions) for _ in requests[place].samplings]
    return [answers[place] for place in range(len(requests))]


def difference(
    answers: Sequence[Answer], expected: Sequence[Completion], tolerance: float = 0.0
) -> str:
    """Return the difference of one request's answers; empty: none but that of logprobs."""
    if len(answers) != len(expected):
        return f"{len(answers)} answers instead of {len(expected)}"
    found = (_difference_of_one(*pair, tolerance) for pair in zip(answers, expected, strict=True))
    return next(filter(None, found), "")


def _difference_of_one(answer: Answer, expected: Completion, tolerance: float) -> str:
    assert answer.finish is not None
    assert expected.finish_reason is not None
    pairs: dict[str, tuple[object, object]] = {
        "tokens": (answer.token_ids, expected.token_ids),
        "text": (answer.text, expected.text),
        "finish reason": (answer.finish.reason, expected.finish_reason.name.lower()),
        "stop string": (answer.finish.stop_string, expected.stop_string),
        "stop token": (answer.finish.stop_token_id, expected.stop_token_id),
    }
    for name in ("logprobs", "prompt_logprobs"):
        mine, right = getattr(answer, name), getattr(expected, name)
        if not _are_alike(mine, right, tolerance):
            pairs[name] = mine, right
    return next((f"{name}: {a} != {b}" for name, (a, b) in pairs.items() if a != b), "")


def _are_alike(
    mine: Sequence[TokenLogprobs | None], right: Sequence[TokenLogprobs | None], tolerance: float
) -> bool:
    if len(mine) != len(right):
        return False
    return all(
        one == other
        if one is None or other is None
        else one.token_id == other.token_id
        and len(one.top) == len(other.top)
        and abs(one.logprob - other.logprob) <= tolerance
        and (tolerance or one == other)
        for one, other in zip(mine, right, strict=True)
    )
