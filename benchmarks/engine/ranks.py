"""Benchmark of a node of several processes: its collective operations, and the rates beside those
of one process with as many threads.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from baton.engine.runner.kernels.build import best_variant, cpu_features, library
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.model.rank_group import Shard
from baton.engine.runner.ranks.links import (
    RankLinks,
    links_bytes,
    make_shared_memory,
    map_shared_memory,
)
from benchmarks.engine.throughput import EngineBench, engine_meter

NUM_REDUCED, NUM_REDUCED_BY_GLOO = 2000, 200


@dataclass(frozen=True, slots=True)
class ReduceTime:
    """All-reduce of bfloat16 numbers, in microseconds."""

    num_bytes: int
    own_p50: float
    own_p99: float
    gloo_p50: float  # of as many bytes, in float32


@dataclass(frozen=True, slots=True)
class RankRate:
    phase: str  # prefill or decode
    size: int  # tokens of the prompt, or requests in the batch
    one_process: float  # tokens/s, with as many threads as all ranks together
    ranks: float
    ratio: float


def reduce_times(num_ranks: int, sizes: Sequence[int]) -> list[ReduceTime]:
    """Measure reduces of each size in the first of several processes with one thread each."""
    kernels = Kernels(library(best_variant(cpu_features())), 1)
    memory, fd = make_shared_memory("benchmark", links_bytes(kernels, num_ranks))
    del memory
    context = get_context("spawn")
    with TemporaryDirectory() as folder, ExitStack() as stack:
        own, other = context.Pipe()
        processes = []
        for rank in range(num_ranks):
            process_fd = f"/proc/{os.getpid()}/fd/{fd}"
            store = str(Path(folder, "gloo"))
            arguments = (rank, num_ranks, process_fd, store, tuple(sizes), other)
            process = context.Process(target=_reduce, args=arguments, daemon=True)
            process.start()
            processes.append(process)
        stack.callback(os.close, fd)
        times: list[ReduceTime] = own.recv()
        for process in processes:
            process.join()
    return times


def _reduce(
    rank: int, size: int, memory_path: str, store: str, sizes: Sequence[int], results: Connection
) -> None:
    torch.set_num_threads(1)
    kernels = Kernels(library(best_variant(cpu_features())), 1)
    fd = os.open(memory_path, os.O_RDWR)
    links = RankLinks(kernels, map_shared_memory(fd, links_bytes(kernels, size)), Shard(rank, size))
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    found = []
    for num_bytes in sizes:
        own = torch.ones(num_bytes // 2, dtype=torch.bfloat16)
        by_gloo = torch.ones(num_bytes // 4)
        seconds = _seconds(partial(links.all_reduce, own), NUM_REDUCED)
        gloo = _seconds(partial(torch.distributed.all_reduce, by_gloo), NUM_REDUCED_BY_GLOO)
        found.append(
            ReduceTime(
                num_bytes, *(1e6 * each for each in (*_percentiles(seconds), gloo[len(gloo) // 2]))
            )
        )
    torch.distributed.destroy_process_group()
    if rank == 0:
        results.send(found)


def _seconds(call: Callable[[], object], count: int) -> list[float]:
    for _ in range(count // 10):
        call()
    seconds = []
    for _ in range(count):
        began_s = perf_counter()
        call()
        seconds.append(perf_counter() - began_s)
    return sorted(seconds)


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    return seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]


def rank_rates(
    bench: EngineBench, num_ranks: int, on_rate: Callable[[RankRate], None]
) -> list[RankRate]:
    """Measure both in turn, so that noise affects them alike. `bench` has the threads of a rank."""
    threads = bench.num_threads or 1
    one = replace(bench, num_threads=threads * num_ranks)
    several = replace(bench, num_ranks=num_ranks)
    rates = []
    with engine_meter(one) as alone, engine_meter(several) as together:
        measured = [("prefill", size) for size in bench.prompt_lens]
        measured += [("decode", size) for size in bench.batch_sizes]
        for phase, size in measured:
            rounds = []
            for number in range(bench.num_runs + 1):
                torch.set_num_threads(threads * num_ranks)
                first = getattr(alone, phase)(size)
                torch.set_num_threads(threads)
                second = getattr(together, phase)(size)
                if number:  # the first one warms up
                    rounds.append((first, second, second / first))
            rates.append(RankRate(phase, size, *map(statistics.median, zip(*rounds, strict=True))))
            on_rate(rates[-1])
    return rates
