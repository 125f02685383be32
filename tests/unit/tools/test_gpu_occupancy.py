"""Occupancy of multiprocessors against results of NVIDIA's occupancy calculator."""

from __future__ import annotations

import pytest

from tools.gpu_occupancy import Occupancy, occupancy


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "programs", "percent"),
    [
        (32, 0, 8, 8, 100),  # limited by warps
        (33, 0, 8, 6, 75),  # by registers, of which a warp gets 1280
        (128, 0, 4, 4, 25),
        (255, 0, 4, 2, 12),
        (16, 0, 1, 32, 50),  # by programs
        (32, 48 << 10, 4, 3, 19),  # by shared memory
    ],
)
def test_the_scarcest_resource_limits_the_programs(
    registers: int, shared_bytes: int, num_warps: int, programs: int, percent: int
) -> None:
    found = occupancy("sm_80", registers, shared_bytes, num_warps)

    assert found == Occupancy(programs, programs * num_warps, percent)


def test_newer_multiprocessors_have_more_shared_memory() -> None:
    older, newer = (occupancy(target, 64, 80_000, 4) for target in ("sm_80", "sm_90"))

    assert older is not None
    assert newer is not None
    assert (older.programs, newer.programs) == (2, 2)
    assert occupancy("sm_90", 64, 70_000, 4) == Occupancy(3, 12, 19)


def test_the_limits_of_other_gpus_are_not_known() -> None:
    assert occupancy("gfx942", 64, 0, 4) is None
