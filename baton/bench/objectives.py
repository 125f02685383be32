"""Latency objectives of a benchmark of serving. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import InvalidConfig

SLO_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives of a good answer. None: no objective."""

    ttft: float | None = None  # seconds
    itl: float | None = None  # 99th percentile of the answer's gaps
    tpot: float | None = None  # mean time per token after the first
    e2e: float | None = None


NO_OBJECTIVES = Slo()


def parse_slo(written: str) -> Slo:
    """Parse objectives such as `ttft=500ms,itl=50ms`. Raises InvalidConfig."""
    limits: dict[str, float] = {}
    for part in filter(None, written.split(",")):
        name, _, limit = part.strip().partition("=")
        unit = "ms" if limit.endswith("ms") else "s"
        try:
            limits[name] = float(limit.removesuffix(unit)) * SLO_UNITS[unit]
            Slo(**limits)
        except (ValueError, TypeError):
            raise InvalidConfig(
                f"{part!r} is not an objective; write it like ttft=500ms,itl=50ms,tpot=40ms,e2e=5s"
            ) from None
    return Slo(**limits)
