"""Forecast of answer durations from recent answers."""

from __future__ import annotations

import pytest

from baton.router.admission.admission_queue import AnswerForecast


def after(
    num: int, *, num_tokens: int = 10, duration_s: float = 5.0, beside: int = 4
) -> AnswerForecast:
    forecast = AnswerForecast()
    for _ in range(num):
        forecast.note_answer(num_tokens, duration_s, beside, is_whole=True)
    return forecast


def test_there_is_no_forecast_before_the_first_answer() -> None:
    forecast = AnswerForecast()
    forecast.note_answer(0, 0.0, 3, is_whole=False)

    assert forecast.duration_s(100, 3) == 0.0


def test_interrupted_answers_are_a_lower_bound_of_the_length() -> None:
    forecast = AnswerForecast()
    forecast.note_answer(5, 2.0, 3, is_whole=False)
    forecast.note_answer(3, 1.2, 3, is_whole=False)

    assert forecast.duration_s(100, 3) == pytest.approx(2.0)


def test_the_forecast_follows_recent_answers() -> None:
    assert after(20).duration_s(None, 4) == pytest.approx(5.0)


def test_the_forecast_scales_with_max_tokens() -> None:
    assert after(20).duration_s(4, 4) == pytest.approx(2.0)
    assert after(20).duration_s(1, 4) == pytest.approx(0.5)


def test_the_forecast_for_a_lone_request_is_zero() -> None:
    assert after(20).duration_s(None, 0) == 0.0


def test_the_forecast_scales_with_fewer_concurrent_answers_only() -> None:
    forecast = after(20, beside=8)

    assert forecast.duration_s(None, 3) == pytest.approx(2.5)
    assert forecast.duration_s(None, 100) == pytest.approx(5.0)


def test_interrupted_answers_count_for_the_token_rate() -> None:
    forecast = after(1)
    for _ in range(100):
        forecast.note_answer(5, 10.0, 4, is_whole=False)

    assert forecast.duration_s(None, 4) == pytest.approx(20.0, rel=0.01)
