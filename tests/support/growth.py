"""Growth of the CPU time of a work with its size, as a ratio that noise can only raise."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

FACTOR = 16
MAX_RATIO = 4.0
MAX_TRIES = 6


def growth(run: Callable[[int], object], size: int) -> float:
    """Return the time of `FACTOR * size`, as a multiple of `FACTOR` times that of `size`.

    1 is linear, `FACTOR` is quadratic. It is measured again while it is above `MAX_RATIO`.
    """
    ratio = float(FACTOR)
    for _ in range(MAX_TRIES):
        small = cpu_time_s(lambda: [run(size) for _ in range(FACTOR)])
        ratio = min(ratio, cpu_time_s(lambda: run(FACTOR * size)) / small)
        if ratio <= MAX_RATIO:
            break
    return ratio


def cpu_time_s(work: Callable[[], object]) -> float:
    """Return the time of the work without garbage collection, which grows with other tests."""
    gc.disable()
    try:
        begin_s = time.thread_time()
        work()
        return time.thread_time() - begin_s
    finally:
        gc.enable()
