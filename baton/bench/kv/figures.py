"""Figures of `baton bench kv`, computed from its rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KvRound:
    """Seconds of the consecutive parts of one round."""

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

    A ratio compares a rate with the contiguous write of the same round, so that temporary slowness
    of the machine cancels out.
    """

    path: str
    block_kib: float
    handoff_mib: float
    memcpy: float
    contiguous: float  # one NIXL write, both sides only poll
    noticed: float  # the same, until the other side has the notification
    scattered: float  # scattered blocks over the bare channel
    written: float  # KV workers: first post until P has seen the last write complete
    landed: float  # first post until D has seen data and Done and may decode
    verified_written: float  # the same, including the digest on P
    verified_landed: float  # the same, including the digests on P and D
    scattered_ratio: float
    written_ratio: float
    landed_ratio: float
    verified_written_ratio: float
    verified_landed_ratio: float
    handoff_us: float  # order on D until landed, with all KV computed before
    handoff_verified_us: float


@dataclass(frozen=True, slots=True)
class TailFigure:
    """Rest of a hand-off after the last chunk of its prefill; medians."""

    path: str
    block_kib: float
    push: str
    verify: bool
    num_chunks: int
    handoff_mib: float
    whole_ms: float  # the same bytes handed over in one go
    tail_ms: float
    tail_share: float
    cost_ms: float  # added duration of the prefill because of pushing


def figure_of(
    path: str, block_bytes: int, num_blocks: int, size: int, rounds: Sequence[KvRound]
) -> KvFigure:
    """Return the medians. References move `size` bytes, the others as many whole blocks."""
    moved = num_blocks * block_bytes

    def rate(part: str, num_bytes: int = moved) -> float:
        seconds: float = statistics.median(getattr(one, part) for one in rounds)
        return num_bytes / seconds / 1e9

    def ratio(part: str) -> float:
        scale = moved / size
        share: float = statistics.median(
            scale * one.contiguous / getattr(one, part) for one in rounds
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
