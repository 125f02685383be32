"""Occupancy of NVIDIA's streaming multiprocessors, computed from the resources of a kernel.

The limits are those of the table of compute capabilities in the CUDA programming guide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WARP_THREADS = 32
REGISTERS = 65_536  # of a multiprocessor
WARP_REGISTERS = 256  # registers are allocated in multiples of this, for a warp
WARPS_TOGETHER = 4  # warps get registers in multiples of this: a quarter has its own ones
RESERVED_SHARED_BYTES = 1024  # of each program, by the system
SHARED_BYTES_STEP = 128


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    max_programs: int
    max_warps: int
    shared_bytes: int


MULTIPROCESSORS: Mapping[str, Multiprocessor] = {
    "sm_80": Multiprocessor(max_programs=32, max_warps=64, shared_bytes=164 << 10),
    "sm_90": Multiprocessor(max_programs=32, max_warps=64, shared_bytes=228 << 10),
    "sm_100": Multiprocessor(max_programs=32, max_warps=64, shared_bytes=228 << 10),
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Programs that a multiprocessor runs at the same time."""

    programs: int
    warps: int
    percent: int  # of the most warps


def occupancy(target: str, registers: int, shared_bytes: int, num_warps: int) -> Occupancy | None:
    """Return the occupancy, or None for a target whose limits are not known."""
    limits = MULTIPROCESSORS.get(target)
    if limits is None:
        return None
    warp_registers = _round_up(registers * WARP_THREADS, WARP_REGISTERS)
    warps = REGISTERS // warp_registers // WARPS_TOGETHER * WARPS_TOGETHER
    shared = _round_up(shared_bytes + RESERVED_SHARED_BYTES, SHARED_BYTES_STEP)
    programs = min(
        limits.max_programs,
        limits.max_warps // num_warps,
        warps // num_warps,
        limits.shared_bytes // shared,
    )
    warps = programs * num_warps
    return Occupancy(programs, warps, round(100 * warps / limits.max_warps))


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
