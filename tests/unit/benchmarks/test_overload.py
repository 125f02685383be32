"""Figures of the overload benchmark, computed from handmade requests."""

from __future__ import annotations

import pytest

from benchmarks.cluster.overload import ORDINARY, URGENT, OverloadRequest, overloaded


def requested(
    at_s: float, took_s: float, priority: int = ORDINARY, **reported: object
) -> OverloadRequest:
    one = OverloadRequest(priority, at_s, ended_s=at_s + took_s)
    for name, value in reported.items():
        setattr(one, name, value)
    return one


def test_the_rate_is_measured_over_the_last_three_quarters() -> None:
    early = [requested(0.0, 0.5) for _ in range(50)]
    steady = [requested(place, 0.5) for place in (2.0, 4.0, 6.0)]

    found = overloaded([*early, *steady], 0.0, 8.0, peak_per_s=1.0)

    assert found.served_per_s == pytest.approx(0.5)
    assert found.share_of_peak == pytest.approx(0.5)


def test_errors_with_retry_after_count_as_refused_and_others_as_unserved() -> None:
    found = overloaded(
        [
            requested(0.0, 1.0, URGENT, first_token_s=0.25),
            requested(0.0, 0.01, reason="TOO_LATE", retry_after_s=3.0),
            requested(0.0, 8.0, reason="DEADLINE_EXCEEDED"),
        ],
        0.0,
        8.0,
        peak_per_s=1.0,
    )

    urgent, ordinary = found.kinds
    assert (urgent.sent, urgent.served, urgent.first_token_p50_ms) == (1, 1, 250.0)
    assert (ordinary.refused, ordinary.unserved) == (1, 1)
    assert ordinary.refusal_p99_ms == pytest.approx(10.0)
    assert found.reasons == {"TOO_LATE": 1, "DEADLINE_EXCEEDED": 1}
