"""The calls of a client request: one for each answer to each prompt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.core.errors import InvalidRequest
from baton.core.foreign_kv import FIELD
from baton.core.sampling import SamplingParams
from baton.router.input_processing.limits import check_hints, check_total_size
from baton.router.values import GenerateCall, Prompt

NUM_SEEDS = 1 << 64


def calls_for_answers(
    call: GenerateCall, prompts: Sequence[Prompt], num_each: int
) -> list[GenerateCall]:
    """Return `num_each` consecutive calls for each prompt, which differ from `call` in the seed.

    All APIs create their calls here. Raises InvalidRequest if these are too large together.
    """
    num_answers = num_each * len(prompts)
    check_total_size(call.sampling, call.bad_words, num_answers)
    check_hints(call.kv_hints, num_answers, call.sampling.prompt_logprobs)
    if call.foreign_kv is not None and call.kv_hints.prefetch:
        raise InvalidRequest(
            f"kv_hints.prefetch: no other request could use the KV of {FIELD}; leave out one of "
            "them",
            "kv_hints.prefetch",
        )
    if num_answers == 1:
        return [call]
    if call.foreign_kv is not None:
        raise InvalidRequest(
            f"{FIELD} is for one prompt and one answer, not for {num_answers}: set n to 1", FIELD
        )
    return [
        replace(
            call,
            request_id=f"{call.request_id}-{index}",
            prompt=prompts[index // num_each],
            sampling=_with_seed(call.sampling, index % num_each),
        )
        for index in range(num_answers)
    ]


def _with_seed(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of answer `index`. The first answer has the seed of the request."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % NUM_SEEDS)
