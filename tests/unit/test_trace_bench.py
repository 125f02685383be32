"""The figures of `baton bench trace`."""

from __future__ import annotations

import pytest

from baton.bench.trace import Load, figure


def test_each_round_is_compared_with_the_one_beside_it() -> None:
    """The machine was half as fast in the second round; tracing cost a tenth throughout."""
    off = Load([1000.0, 500.0, 1000.0], [0.01] * 200)
    traced = Load([900.0, 450.0, 950.0], [0.01] * 198 + [0.5] * 2)

    shown = figure("100 %", traced, off)

    assert shown.of_off == pytest.approx(0.9)
    assert (shown.lowest_of_off, shown.highest_of_off) == pytest.approx((0.9, 0.95))
    assert shown.tokens_per_s == 900.0
    assert shown.p99_itl_ms > 100
