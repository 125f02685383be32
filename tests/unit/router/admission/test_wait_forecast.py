"""Forecast of the time to first token from recent requests."""

from __future__ import annotations

import pytest

from baton.router.admission.admission_queue import FirstTokenForecast


def steady(interval_s: float, num: int = 200) -> tuple[FirstTokenForecast, float]:
    """Return a forecast after `num` first tokens at this interval, with two requests ahead."""
    forecast, now = FirstTokenForecast(), 0.0
    forecast.note_arrival(0, now)
    forecast.note_arrival(0, now)
    for _ in range(num):
        now += interval_s
        forecast.note_arrival(0, now)
        forecast.note_first_token(0, now)
    return forecast, now


def test_there_is_no_forecast_before_the_first_measurement() -> None:
    forecast = FirstTokenForecast()
    forecast.note_arrival(0, 0.0)

    assert forecast.wait_s(0) == 0.0


def test_the_wait_is_one_interval_per_request_ahead_plus_one() -> None:
    forecast, _ = steady(0.5)

    assert forecast.wait_s(0) == pytest.approx(1.5)


def test_idle_time_does_not_count_as_slowness() -> None:
    forecast, now = steady(0.5)
    forecast.note_left(0)
    forecast.note_left(0)

    forecast.note_arrival(0, now + 1000.0)
    forecast.note_first_token(0, now + 1000.5)
    forecast.note_arrival(0, now + 1001.0)

    assert forecast.wait_s(0) == pytest.approx(1.0)


def test_with_an_empty_queue_no_wait_is_forecast() -> None:
    """Otherwise one slow answer would cause all requests to be refused, with no new measurement."""
    forecast = FirstTokenForecast()
    forecast.note_arrival(0, 0.0)
    forecast.note_first_token(0, 1000.0)

    assert forecast.wait_s(0) == 0.0


def test_only_requests_of_equal_or_higher_priority_are_ahead() -> None:
    forecast, _ = steady(0.5)

    assert forecast.wait_s(-1) == 0.0
    assert forecast.wait_s(1) == forecast.wait_s(0)
