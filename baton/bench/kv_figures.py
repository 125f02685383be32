"""The figures of `baton bench kv`, made of the rounds that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KvRound:
    """Seconds that one round took, its parts one after the other."""

    memcpy: float
    contiguous: float
    noticed: float
    scattered: float
    written: float
    landed: float
    verified_written: float
    verified_landed: float
    handoff: float
    handoff_verified: float


@dataclass(frozen=True, slots=True)
class KvFigure:
    """Medians of one size over one path, rates in GB/s.

    A ratio is that of a rate to the contiguous write of the same round, so that a machine which
    is slower for a while slows both.
    """

    path: str
    block_kib: float
    handoff_mib: float
    memcpy: float
    contiguous: float  # one NIXL write, both sides doing nothing but poll
    noticed: float  # the same until the other side has the notification of it
    scattered: float  # the blocks, by the bare channel
    written: float  # by the worker halves: first post until P has seen the last write end
    landed: float  # first post until D has seen data and Done and may decode
    verified_written: float  # the same with digests: P's is in it
    verified_landed: float  # and D's in this one
    scattered_ratio: float
    written_ratio: float
    landed_ratio: float
    verified_written_ratio: float
    verified_landed_ratio: float
    handoff_us: float  # the order on D until landed, all of it computed before
    handoff_verified_us: float


@dataclass(frozen=True, slots=True)
class TailFigure:
    """What is left of a hand-off when the last chunk of its prefill has ended; medians."""

    path: str
    block_kib: float
    push: str
    verify: bool
    num_chunks: int
    handoff_mib: float
    whole_ms: float  # the same bytes handed over in one go
    tail_ms: float
    tail_share: float
    cost_ms: float  # by which pushing made the prefill itself longer


def figure_of(
    path: str, block_bytes: int, num_blocks: int, size: int, rounds: Sequence[KvRound]
) -> KvFigure:
    """The references move `size` bytes, and the blocks what whole blocks of that come to."""
    moved = num_blocks * block_bytes

    def rate(part: str, num_bytes: int = moved) -> float:
        seconds: float = statistics.median(getattr(one, part) for one in rounds)
        return num_bytes / seconds / 1e9

    def ratio(part: str) -> float:
        alike = moved / size
        share: float = statistics.median(
            alike * one.contiguous / getattr(one, part) for one in rounds
        )
        return share

    return KvFigure(
        path=path,
        block_kib=block_bytes / 1024,
        handoff_mib=moved / MIB,
        memcpy=rate("memcpy", size),
        contiguous=rate("contiguous", size),
        noticed=rate("noticed", size),
        scattered=rate("scattered"),
        written=rate("written"),
        landed=rate("landed"),
        verified_written=rate("verified_written"),
        verified_landed=rate("verified_landed"),
        scattered_ratio=ratio("scattered"),
        written_ratio=ratio("written"),
        landed_ratio=ratio("landed"),
        verified_written_ratio=ratio("verified_written"),
        verified_landed_ratio=ratio("verified_landed"),
        handoff_us=statistics.median(one.handoff for one in rounds) * 1e6,
        handoff_verified_us=statistics.median(one.handoff_verified for one in rounds) * 1e6,
    )
