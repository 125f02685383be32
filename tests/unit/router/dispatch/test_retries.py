"""Budget of retries."""

from __future__ import annotations

import pytest

from baton.router.dispatch.retries import RetryBudget


def test_at_first_there_is_a_retry_for_every_request_under_way() -> None:
    budget = RetryBudget(3)

    assert [budget.spend() for _ in range(4)] == [True, True, True, False]


def test_in_an_outage_retries_add_no_more_than_their_share() -> None:
    budget = RetryBudget(10, share=0.2)
    num_retries = 0
    for _ in range(1000):
        budget.note_request()
        num_retries += budget.spend()

    assert num_retries == pytest.approx(10 + 200, abs=1)


def test_quiet_times_save_no_more_than_the_most() -> None:
    budget = RetryBudget(2)
    for _ in range(1000):
        budget.note_request()

    assert [budget.spend() for _ in range(3)] == [True, True, False]
