"""Check of what nodes of several processes exchange: the time of a sum in shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from baton.core.errors import NamedError
from baton.doctor.findings import Finding, fail, ok, warn
from baton.engine.runner.kernels.build import best_variant, built, cpu_features

NUM_NUMBERS = 2048  # of 2 bytes
SLOW_S = 50e-6
CHECK = "ranks"


def _in_shared_memory(library: Path) -> float:
    from baton.engine.runner.ranks.measuring import median_sum_s

    return median_sum_s(library, NUM_NUMBERS)


MEASUREMENTS: tuple[Callable[[Path], float], ...] = (_in_shared_memory,)


def check_collectives() -> Iterator[Finding]:
    """Measure sums between two processes. Yields nothing without kernels or a second core."""
    library = built(best_variant(cpu_features()))
    if library is None or len(os.sched_getaffinity(0)) < 2:
        return
    for measure in MEASUREMENTS:
        try:
            yield collectives_finding(measure(library))
        except NamedError as error:
            yield fail(CHECK, str(error), "use one process for each node")


def collectives_finding(median_s: float) -> Finding:
    found = f"two processes add up {2 * NUM_NUMBERS} bytes in {1e6 * median_s:.1f} µs (median)"
    if median_s <= SLOW_S:
        return ok(CHECK, found)
    advice = (
        "a layer has two sums: leave each process of --tensor-parallel-size cores of its own, or "
        "use one process"
    )
    return warn(CHECK, found, advice)
