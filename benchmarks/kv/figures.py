"""Figures of `python -m benchmarks kv`, computed from its rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KvRound:
    """Seconds of the consecutive parts of one round."""

    memcpy: float
    contiguous: float  # one NIXL write, both sides only poll
    noticed: float  # the same, until the other side has the notification
    scattered: float  # scattered blocks over the bare channel
    written: float  # KV workers: first post until P has seen the last write complete
    landed: float  # first post until D has seen data and Done and may decode
    verified_written: float  # the same, including the digest on P
    verified_landed: float  # the same, including the digests on P and D
    handoff: float  # order on D until landed, with all KV computed before
    handoff_verified: float


REFERENCES = ("memcpy", "contiguous", "noticed")
TRANSFERS = ("scattered", "written", "landed", "verified_written", "verified_landed")


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
) -> dict[str, Any]:
    """Return the medians of one size over one path: rates in GB/s, and times in µs.

    References move `size` bytes, the others as many whole blocks. A ratio compares a rate with the
    contiguous write of the same round, so that temporary slowness of the machine cancels out.
    """
    moved = num_blocks * block_bytes

    def rate(part: str, num_bytes: int) -> float:
        seconds: float = statistics.median(getattr(one, part) for one in rounds)
        return num_bytes / seconds / 1e9

    def ratio(part: str) -> float:
        share: float = statistics.median(one.contiguous / getattr(one, part) for one in rounds)
        return moved / size * share

    return {
        "path": path,
        "block_kib": block_bytes / 1024,
        "handoff_mib": moved / MIB,
        **{part: rate(part, size) for part in REFERENCES},
        **{part: rate(part, moved) for part in TRANSFERS},
        **{f"{part}_ratio": ratio(part) for part in TRANSFERS},
        "handoff_us": statistics.median(one.handoff for one in rounds) * 1e6,
        "handoff_verified_us": statistics.median(one.handoff_verified for one in rounds) * 1e6,
    }
