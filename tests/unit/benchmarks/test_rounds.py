"""Figures of benchmarks whose rounds are played in turns."""

from __future__ import annotations

import pytest

from benchmarks.cluster.rounds import RoundLoad, figure, median_bounds


def test_each_round_is_compared_with_the_adjacent_round() -> None:
    """The machine is half as fast in the second round; tracing costs a tenth throughout."""
    off = RoundLoad([1000.0, 500.0, 1000.0], [0.01] * 200)
    traced = RoundLoad([900.0, 450.0, 950.0], [0.01] * 198 + [0.5] * 2)

    shown = figure("100 %", traced, off)

    assert shown.of_first == pytest.approx(0.9)
    assert (shown.at_least, shown.at_most) == pytest.approx((0.9, 0.95))
    assert shown.tokens_per_s == 900.0
    assert shown.p99_itl_ms > 100


@pytest.mark.parametrize(
    ("num", "bounds"),
    [(1, (0, 0)), (5, (0, 4)), (6, (0, 5)), (9, (1, 7)), (15, (3, 11)), (25, (7, 17))],
)
def test_the_bounds_of_a_median_are_those_of_the_sign_test(
    num: int, bounds: tuple[int, int]
) -> None:
    """Tables of the sign test give the 4th smallest and the 4th largest of 15 values."""
    assert median_bounds(range(num)) == bounds
