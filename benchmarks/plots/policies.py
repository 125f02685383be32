"""Plot of hit rates and waiting times by routing policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.bench.plots import picture
from benchmarks.router.policies import PolicyFigures


def draw(figures: Sequence[PolicyFigures], path: Path) -> None:
    """Plot hit rates and the 99th percentile of waiting time by policy."""
    names, places = [one.policy for one in figures], range(len(figures))
    with picture(path, 10, 4, columns=2) as [[rates, waits]]:
        rates.bar([at - 0.2 for at in places], [one.prefill_hit_rate for one in figures], 0.4)
        rates.bar([at + 0.2 for at in places], [one.decode_hit_rate for one in figures], 0.4)
        rates.legend(["prefill", "decode"], frameon=False, loc="upper left")
        rates.set(title="prompt tokens found in the cache", ylim=(0, 1))
        waits.bar(places, [one.p99_wait_s * 1e3 for one in figures], 0.5, color="tab:gray")
        waits.set(title="99th percentile of the wait for the first token, ms")
        for axes in (rates, waits):
            axes.set_xticks(places, names, rotation=15)
