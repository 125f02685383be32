"""Measurement of a sum between two processes. As a program, it is the second one."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import torch

from baton.engine.errors import ProcessLost
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.model.rank_group import Shard
from baton.engine.runner.ranks.links import (
    RankLinks,
    links_bytes,
    make_shared_memory,
    map_shared_memory,
)

NUM_SUMS = 2000
PATIENCE_S = 20.0


def median_sum_s(library: Path, num_numbers: int) -> float:
    """Return the median time of a sum of bfloat16 numbers. Raises ProcessLost and InvalidConfig."""
    memory, fd = make_shared_memory("baton measurement", links_bytes(Kernels(library, 1), 2))
    command = [sys.executable, "-m", __name__, str(fd), str(library), str(num_numbers)]
    try:
        with memory, subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE) as other:
            try:
                # Its imports, which take long on a busy machine, do not count as silence.
                if other.stdout is None or not other.stdout.readline():
                    raise ProcessLost("the second process of the measurement has ended")
                return _add_up(0, fd, library, num_numbers)
            finally:
                other.kill()
    finally:
        os.close(fd)


def _add_up(rank: int, fd: int, library: Path, num_numbers: int) -> float:
    kernels = Kernels(library, 1)
    memory = map_shared_memory(fd, links_bytes(kernels, 2))
    links = RankLinks(kernels, memory, Shard(rank, 2), PATIENCE_S)
    numbers, times_s = torch.zeros(num_numbers, dtype=torch.bfloat16), []
    for _ in range(NUM_SUMS):
        began_s = perf_counter()
        links.all_reduce(numbers)
        times_s.append(perf_counter() - began_s)
    return statistics.median(times_s)


if __name__ == "__main__":
    print("ready", flush=True)
    _add_up(1, int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
