from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer.tiers.tier_status import HALF_LIFE_S, LoadTimes

GUESS_S = 0.001


def test_the_first_estimate_is_the_initial_guess() -> None:
    assert LoadTimes(GUESS_S).load_s(7, now=50.0) == pytest.approx(7 * GUESS_S)


@pytest.mark.parametrize("factor", [0.05, 1.0, 20.0])
def test_the_estimate_converges_to_measured_load_times(factor: float) -> None:
    times = LoadTimes(GUESS_S)
    for number in range(20):
        times.learn(3 * factor * GUESS_S, 3, now=number * 0.1)
    assert times.load_s(1, now=2.0) == pytest.approx(factor * GUESS_S, rel=0.3)


@pytest.mark.parametrize("factor", [1e-6, 0.0, 1e6])
def test_one_load_changes_the_estimate_by_a_factor_of_two_at_most(factor: float) -> None:
    times = LoadTimes(GUESS_S)
    times.learn(factor * GUESS_S, 1, now=0.0)
    assert GUESS_S / 2 < times.load_s(1, now=0.0) < GUESS_S * 2


def test_the_estimate_of_large_loads_assumes_parallel_reads() -> None:
    times = LoadTimes(GUESS_S, num_parallel=8)
    assert times.load_s(16, now=0.0) == pytest.approx(16 * GUESS_S)
    for _ in range(30):
        times.learn(0.05, 1, now=0.0)
    one_s, many_s = times.load_s(1, now=0.0), times.load_s(16, now=0.0)
    assert one_s == pytest.approx(0.05, rel=0.1)
    assert many_s == pytest.approx(2 * one_s)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 1e4)), max_size=60))
def test_a_slow_tier_is_tried_again(loads: list[tuple[int, float]]) -> None:
    times, now_s = LoadTimes(GUESS_S), 0.0
    for num_blocks, factor in loads:
        times.learn(num_blocks * factor * GUESS_S, num_blocks, now_s)
        now_s += 0.1
    assert GUESS_S / 2 < times.load_s(1, now_s + 4 * HALF_LIFE_S) < GUESS_S * 2
