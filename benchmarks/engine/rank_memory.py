"""Memory of the weights in each process of a node, beside one process with all of them.

It is what the kernel counts as private, less the same of a node with the demo model.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.open_runner import open_runner
from benchmarks.chaos.ranks import ranks_of

TINY_MODEL = "models/demo"
KV_BYTES, MAX_MODEL_LEN = 16 << 20, 512
KIB_PER_MIB = 1024


@dataclass(frozen=True, slots=True)
class RankMemory:
    process: str
    weights_mib: float
    ratio: float  # of those of one process


def rank_memory(config: RunnerConfig) -> Iterator[RankMemory]:
    """Yield the memory of one process, and of each of several as in the settings."""
    config = replace(config, kv_cache_bytes=KV_BYTES, max_model_len=MAX_MODEL_LEN)
    [whole] = _weights_mib(replace(config, tensor_parallel_size=1, enable_expert_parallel=False))
    yield RankMemory("one", whole, 1.0)
    for rank, mib in enumerate(_weights_mib(config)):
        yield RankMemory(f"rank {rank}", mib, mib / whole)


def _weights_mib(config: RunnerConfig) -> Iterator[float]:
    tiny = replace(config, model=TINY_MODEL, enable_expert_parallel=False)
    pairs = zip(_private_mib(config), _private_mib(tiny), strict=True)
    return (own - others for own, others in pairs)


def _private_mib(config: RunnerConfig) -> list[float]:
    """Return the private memory of each process of a node that has loaded its model."""
    context = get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=_load, args=(config, other))
    process.start()
    other.close()
    try:
        found: list[float] = own.recv()  # or EOFError, if it fails
    finally:
        process.join()
    return found


def _load(config: RunnerConfig, found: Connection) -> None:
    with open_runner(config):
        gc.collect()
        own = os.getpid()
        found.send([_private_mib_of(each) for each in (own, *sorted(ranks_of(own)))])


def _private_mib_of(process_id: int) -> float:
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / KIB_PER_MIB
