"""Budget of retries."""

from __future__ import annotations

import pytest

from baton.router.dispatch.retries import RetryBudget


def test_the_initial_budget_allows_one_retry_per_request() -> None:
    budget = RetryBudget(3)

    assert [budget.spend() for _ in range(4)] == [True, True, True, False]


def test_retries_in_an_outage_are_limited_to_their_share() -> None:
    budget = RetryBudget(10, share=0.2)
    num_retries = 0
    for _ in range(1000):
        budget.note_request()
        num_retries += budget.spend()

    assert num_retries == pytest.approx(10 + 200, abs=1)


def test_the_saved_retry_budget_is_bounded() -> None:
    budget = RetryBudget(2)
    for _ in range(1000):
        budget.note_request()

    assert [budget.spend() for _ in range(3)] == [True, True, False]
