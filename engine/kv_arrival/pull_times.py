"""Estimates, from past pulls, how long a pull from a peer takes. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.ids import NodeId

LATENCY_S = 0.02  # of a pull of any size
BYTE_S = 1e-9  # until it is known: a GB per second
MIN_MEASURED_BYTES = 1 << 20  # smaller pulls show only the latency
SMOOTHING = 0.25
FORGET_S = 60.0  # a peer that was busy is tried again
# A pull that fails at once, such as that of evicted blocks, costs nothing. After others, requests
# compute instead of waiting again.
HARMLESS_S = 0.5
AVOID_S = 10.0


@dataclass(frozen=True, slots=True)
class _Measured:
    byte_s: float
    at_s: float


class PullTimes:
    def __init__(self) -> None:
        self._measured: dict[NodeId, _Measured] = {}
        self._avoided_until_s: dict[NodeId, float] = {}

    def estimate_s(self, peer: NodeId, num_bytes: int, now: float) -> float | None:
        """Return the time that a pull takes; None if the peer is to be avoided."""
        if now < self._avoided_until_s.get(peer, now):
            return None
        return LATENCY_S + num_bytes * self.byte_s(peer, now)

    def byte_s(self, peer: NodeId, now: float) -> float:
        """Return the time that each byte from a peer takes."""
        measured = self._measured.get(peer)
        is_known = measured is not None and now - measured.at_s < FORGET_S
        return measured.byte_s if measured is not None and is_known else BYTE_S

    def record(self, peer: NodeId, num_bytes: int, seconds: float, now: float) -> None:
        """Record a pull that has landed."""
        if num_bytes < MIN_MEASURED_BYTES:
            return
        self._forget_old(now)
        byte_s = max(0.0, seconds - LATENCY_S) / num_bytes
        before = self._measured.get(peer)
        if before is not None:
            byte_s = before.byte_s + SMOOTHING * (byte_s - before.byte_s)
        self._measured[peer] = _Measured(byte_s, now)

    def record_failure(self, peer: NodeId, seconds: float, now: float) -> None:
        """Record a pull that was lost, or that requests no longer wait for."""
        self._forget_old(now)
        if seconds >= HARMLESS_S:
            self._avoided_until_s[peer] = now + AVOID_S

    def _forget_old(self, now: float) -> None:
        """Drop what no longer counts: nodes come and go."""
        self._measured = {
            peer: each for peer, each in self._measured.items() if now - each.at_s < FORGET_S
        }
        self._avoided_until_s = {
            peer: until_s for peer, until_s in self._avoided_until_s.items() if now < until_s
        }
