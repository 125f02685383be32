"""Memory growth of a cluster's processes under very many short requests."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from baton.bench.load import FIRST_PLAIN_TOKEN
from baton.client import AsyncClient, BatonError, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from benchmarks.chaos.leaks import Footprint, footprint

MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryBench:
    cluster: ClusterOptions
    num_requests: int = 100_000
    num_clients: int = 32
    prompt_tokens: int = 24
    answer_tokens: int = 2
    every_s: float = 1.0


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Footprint of all processes after `num_ended` requests."""

    num_ended: int
    footprint_by_name: Mapping[str, Footprint]


@dataclass(frozen=True, slots=True)
class FittedLine:
    """Least-squares line."""

    per_x: float
    spread: float  # standard deviation of the residuals


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one process in MiB, with the line fitted to the second half of the run."""

    process: str
    first_mib: float
    half_mib: float
    last_mib: float
    mib_per_100k: float
    spread_mib: float
    descriptors: str
    threads: str


@dataclass(slots=True)
class MemoryRun:
    """Result of a run."""

    elapsed_s: float = 0.0
    num_ended: int = 0
    num_failed: int = 0
    looks: list[MemorySample] = field(default_factory=list)

    @property
    def growths(self) -> list[Growth]:
        names = self.looks[0].footprint_by_name if self.looks else {}
        return [_growth(name, self.looks) for name in names]


OnLook = Callable[[MemorySample], None]


async def run(bench: MemoryBench, stop: asyncio.Event, on_look: OnLook) -> MemoryRun:
    """Run until done or until `stop` is set. Raises named errors."""
    cluster = LocalCluster(bench.cluster)
    await asyncio.to_thread(cluster.__enter__)
    try:
        async with AsyncClient(cluster.address) as client:
            return await _measure(bench, cluster, client, stop, on_look)
    finally:
        await asyncio.to_thread(cluster.__exit__, None, None, None)


async def _measure(
    bench: MemoryBench,
    cluster: LocalCluster,
    client: AsyncClient,
    stop: asyncio.Event,
    on_look: OnLook,
) -> MemoryRun:
    held, numbers = MemoryRun(), itertools.count()
    plain = range(FIRST_PLAIN_TOKEN, (await client.model()).vocab_size)
    draw = random.Random(0)
    sampling = SamplingParams(max_tokens=bench.answer_tokens, temperature=0.0, ignore_eos=True)
    pids = {child.name: child.process.pid for child in cluster.children}
    pids["this client"] = os.getpid()

    async def send_requests() -> None:
        while next(numbers) < bench.num_requests and not stop.is_set():
            prompt = tuple(draw.choices(plain, k=bench.prompt_tokens))
            try:
                await client.generate(prompt, Generation(sampling))
            except BatonError:
                held.num_failed += 1
            held.num_ended += 1

    began_s = time.monotonic()
    async with _sampled(held, pids, bench.every_s, on_look), asyncio.TaskGroup() as group:
        for _ in range(bench.num_clients):
            group.create_task(send_requests())
    held.elapsed_s = time.monotonic() - began_s
    return held


@asynccontextmanager
async def _sampled(
    held: MemoryRun, pids: Mapping[str, int], every_s: float, on_look: OnLook
) -> AsyncIterator[None]:
    async def sample() -> None:
        while True:
            found = {name: footprint(pid) for name, pid in pids.items()}
            held.looks.append(MemorySample(held.num_ended, found))
            on_look(held.looks[-1])
            await asyncio.sleep(every_s)

    sampling = asyncio.ensure_future(sample())
    try:
        yield
    finally:
        sampling.cancel()


def _growth(name: str, looks: Sequence[MemorySample]) -> Growth:
    half = [one for one in looks if 2 * one.num_ended >= looks[-1].num_ended]
    line = line_through(
        [(one.num_ended, one.footprint_by_name[name].rss_bytes / MIB) for one in half]
    )
    first, middle, last = (one.footprint_by_name[name] for one in (looks[0], half[0], looks[-1]))
    return Growth(
        process=name,
        first_mib=first.rss_bytes / MIB,
        half_mib=middle.rss_bytes / MIB,
        last_mib=last.rss_bytes / MIB,
        mib_per_100k=line.per_x * 100_000,
        spread_mib=line.spread,
        descriptors=f"{middle.num_descriptors} → {last.num_descriptors}",
        threads=f"{middle.num_threads} → {last.num_threads}",
    )


def line_through(points: Sequence[tuple[float, float]]) -> FittedLine:
    """Fit a line; it is level if all points have the same x."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    width = sum((x - mean_x) ** 2 for x, _ in points)
    per_x = sum((x - mean_x) * (y - mean_y) for x, y in points) / width if width else 0.0
    residuals = sum((y - mean_y - per_x * (x - mean_x)) ** 2 for x, y in points)
    return FittedLine(per_x, (residuals / len(points)) ** 0.5)
