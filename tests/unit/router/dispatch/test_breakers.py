"""Circuit breakers: failing nodes are avoided, probed and restored."""

from __future__ import annotations

import pytest

from baton.router.dispatch.retries import BreakerConfig, CircuitBreakers

CONFIG = BreakerConfig(num_failures=2, first_pause_s=1.0, max_pause_s=4.0)
NODE, OTHER = "p:1", "p:2"


def failed(times: int, at_s: float = 0.0) -> CircuitBreakers:
    breakers = CircuitBreakers(CONFIG)
    for _ in range(times):
        breakers.note_failure([NODE], at_s)
    return breakers


def test_consecutive_failures_open_the_breaker_of_that_node_only() -> None:
    assert failed(1).avoided_addresses(0.0) == frozenset()
    assert failed(2).avoided_addresses(0.0) == {NODE}


def test_a_success_resets_the_count_of_failures() -> None:
    breakers = failed(1)

    breakers.note_success([NODE, OTHER])
    breakers.note_failure([NODE], 0.0)

    assert breakers.avoided_addresses(0.0) == frozenset()


def test_after_its_pause_one_request_probes_a_node_while_others_avoid_it() -> None:
    breakers = failed(2)
    assert breakers.avoided_addresses(1.0) == frozenset()

    breakers.note_sent([NODE, OTHER], 1.0)

    assert breakers.avoided_addresses(1.0) == {NODE}


def test_a_successful_probe_closes_the_breaker() -> None:
    breakers = failed(2)
    breakers.note_sent([NODE], 1.0)

    breakers.note_success([NODE])

    assert breakers.avoided_addresses(1.0) == frozenset()


def test_an_unanswered_probe_is_followed_by_another() -> None:
    breakers = failed(2)

    breakers.note_sent([NODE], 1.0)

    assert breakers.avoided_addresses(2.0) == frozenset()


@pytest.mark.parametrize(
    ("times", "pause_s"), [(2, 1.0), (3, 2.0), (4, 4.0), (5, 4.0), (5000, 4.0)]
)
def test_pauses_double_up_to_a_maximum(times: int, pause_s: float) -> None:
    breakers = failed(times, at_s=10.0)

    assert breakers.avoided_addresses(10.0 + pause_s - 0.01) == {NODE}
    assert breakers.avoided_addresses(10.0 + pause_s) == frozenset()
