"""Answers that fit the context length."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingParams, fit_max_tokens


@pytest.mark.parametrize(
    ("max_tokens", "num_prompt_tokens", "fitted"),
    [(9, 11, 9), (10, 10, 10), (11, 10, 10), (10**6, 19, 1), (5, 20, 5), (5, 30, 5)],
)
def test_max_tokens_is_limited_by_the_remaining_context(
    max_tokens: int, num_prompt_tokens: int, fitted: int
) -> None:
    sampling, warning = fit_max_tokens(SamplingParams(max_tokens), num_prompt_tokens, 20)

    assert sampling.max_tokens == fitted
    assert bool(warning) == (fitted < max_tokens)


def test_the_warning_states_both_numbers() -> None:
    _, warning = fit_max_tokens(SamplingParams(100), 15, 20)

    assert warning == (
        "max_tokens 100 was lowered to 5: prompt and answer can have 20 tokens together, and the "
        "prompt has 15"
    )


def test_unreachable_min_tokens_are_refused_by_name() -> None:
    assert fit_max_tokens(SamplingParams(100, min_tokens=5), 15, 20)[0].max_tokens == 5
    with pytest.raises(InvalidRequest, match="lower it to at most 5") as refusal:
        fit_max_tokens(SamplingParams(100, min_tokens=6), 15, 20)

    assert refusal.value.field == "min_tokens"
