"""Answers that fit the context length: `max_tokens` is lowered to what the prompt leaves. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingParams


class FittedSampling(NamedTuple):
    sampling: SamplingParams
    warning: str = ""  # empty: max_tokens is as requested


def fit_max_tokens(
    sampling: SamplingParams, num_prompt_tokens: int, max_sequence_len: int
) -> FittedSampling:
    """Lower `max_tokens` to the rest of a sequence of at most `max_sequence_len` tokens.

    A prompt without any rest is left to `validate_request`. Raises InvalidRequest if `min_tokens`
    exceeds the rest.
    """
    rest = max_sequence_len - num_prompt_tokens
    if rest < 1 or sampling.max_tokens <= rest:
        return FittedSampling(sampling)
    reason = (
        f"prompt and answer can have {max_sequence_len} tokens together, and the prompt has "
        f"{num_prompt_tokens}"
    )
    if sampling.min_tokens > rest:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}: {reason}; lower it to at most {rest}, or "
            "shorten the prompt",
            "min_tokens",
        )
    return FittedSampling(
        replace(sampling, max_tokens=rest),
        f"max_tokens {sampling.max_tokens} was lowered to {rest}: {reason}",
    )
