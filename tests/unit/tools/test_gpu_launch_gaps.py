"""Gaps between kernels: known intervals."""

from __future__ import annotations

from tools.gpu_launch_gaps import Gaps, Kernel, find_gaps, longest

KERNELS = [
    Kernel("b", 12.0, 20.0),  # in no order
    Kernel("a", 0.0, 10.0),
    Kernel("c", 15.0, 18.0),  # at the same time as another one
    Kernel("a", 26.0, 30.0),
]


def test_gaps_are_between_the_end_of_all_kernels_and_the_next_start() -> None:
    found = find_gaps(KERNELS)

    assert found == Gaps(num_kernels=4, busy=22.0, idle=8.0, median_gap=2.0)
    assert round(found.idle_share, 3) == 0.267


def test_without_kernels_nothing_is_idle() -> None:
    assert find_gaps([]) == Gaps(0, 0.0, 0.0, 0.0)
    assert find_gaps([]).idle_share == 0.0


def test_the_durations_of_a_name_are_added_up() -> None:
    assert longest(KERNELS) == [("a", 14.0), ("b", 8.0), ("c", 3.0)]
