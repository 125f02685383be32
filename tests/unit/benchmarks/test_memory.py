"""Memory growth, fitted to samples of processes."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.chaos.leaks import Footprint
from benchmarks.cluster.memory import MIB, MemoryRun, MemorySample, line_through


def test_the_fit_of_collinear_points_is_exact() -> None:
    line = line_through([(x, 3.0 + 0.5 * x) for x in (0, 10, 40)])

    assert line.per_x == pytest.approx(0.5)
    assert line.spread == pytest.approx(0.0, abs=1e-9)


def test_the_fit_reports_the_spread_of_points() -> None:
    line = line_through([(0, 1.0), (1, 3.0), (2, 1.0), (3, 3.0)])

    assert line.spread > 0.5


def test_points_with_one_x_value_have_no_slope() -> None:
    assert line_through([(7, 1.0), (7, 2.0)]).per_x == 0.0


def held(*rss_mib: float) -> MemoryRun:
    """Return a run with one sample per thousand requests."""
    looks = [
        MemorySample(
            1000 * number, {"node": Footprint(Counter(file=20 + number), 9, round(rss * MIB))}
        )
        for number, rss in enumerate(rss_mib)
    ]
    return MemoryRun(looks=looks)


def test_start_up_memory_is_not_growth() -> None:
    [growth] = held(50, 90, 100, 100, 100).growths

    assert (growth.first_mib, growth.half_mib, growth.last_mib) == (50, 100, 100)
    assert growth.mib_per_100k == pytest.approx(0.0)


def test_memory_per_request_is_growth() -> None:
    [growth] = held(50, 90, 100, 101, 102).growths

    assert growth.mib_per_100k == pytest.approx(100.0)
    assert growth.descriptors == "22 → 24"
