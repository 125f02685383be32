"""Memory of a cluster's processes under very many short requests, and how it grows."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from baton.bench.chaos_leaks import Footprint, footprint
from baton.bench.serve_load import FIRST_PLAIN_TOKEN
from baton.client import AsyncClient, BatonError, Generation
from baton.cluster import ClusterOptions, LocalCluster
from engine.sampling import SamplingParams

MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryBench:
    cluster: ClusterOptions
    num_requests: int = 100_000
    num_clients: int = 32
    prompt_tokens: int = 24
    answer_tokens: int = 2
    every_s: float = 1.0  # from look to look


@dataclass(frozen=True, slots=True)
class Look:
    """What all processes held when so many requests had ended."""

    num_ended: int
    footprint_by_name: Mapping[str, Footprint]


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line through points, by least squares."""

    per_x: float
    spread: float  # the standard deviation of the points around it


@dataclass(frozen=True, slots=True)
class Growth:
    """One process: MiB in its memory, and the line through what it held in the second half."""

    process: str
    first_mib: float
    half_mib: float
    last_mib: float
    mib_per_100k: float
    spread_mib: float
    descriptors: str
    threads: str


@dataclass(slots=True)
class Held:
    """A whole run."""

    elapsed_s: float = 0.0
    num_ended: int = 0
    num_failed: int = 0
    looks: list[Look] = field(default_factory=list)

    @property
    def growths(self) -> list[Growth]:
        names = self.looks[0].footprint_by_name if self.looks else {}
        return [_growth(name, self.looks) for name in names]


OnLook = Callable[[Look], None]


async def run(what: MemoryBench, stop: asyncio.Event, on_look: OnLook) -> Held:
    """Ends early, and tells what came so far, once `stop` is set. Raises named errors."""
    cluster = LocalCluster(what.cluster)
    await asyncio.to_thread(cluster.__enter__)
    try:
        async with AsyncClient(cluster.address) as client:
            return await _measure(what, cluster, client, stop, on_look)
    finally:
        await asyncio.to_thread(cluster.__exit__, None, None, None)


async def _measure(
    what: MemoryBench,
    cluster: LocalCluster,
    client: AsyncClient,
    stop: asyncio.Event,
    on_look: OnLook,
) -> Held:
    held, numbers = Held(), itertools.count()
    plain = range(FIRST_PLAIN_TOKEN, (await client.model()).vocab_size)
    draw = random.Random(0)
    sampling = SamplingParams(max_tokens=what.answer_tokens, temperature=0.0, ignore_eos=True)
    pids = {child.name: child.process.pid for child in cluster.children}
    pids["this client"] = os.getpid()

    async def ask_on() -> None:
        while next(numbers) < what.num_requests and not stop.is_set():
            prompt = tuple(draw.choices(plain, k=what.prompt_tokens))
            try:
                await client.generate(prompt, Generation(sampling))
            except BatonError:
                held.num_failed += 1
            held.num_ended += 1

    began_s = time.monotonic()
    async with _looked_at(held, pids, what.every_s, on_look), asyncio.TaskGroup() as group:
        for _ in range(what.num_clients):
            group.create_task(ask_on())
    held.elapsed_s = time.monotonic() - began_s
    return held


@asynccontextmanager
async def _looked_at(
    held: Held, pids: Mapping[str, int], every_s: float, on_look: OnLook
) -> AsyncIterator[None]:
    async def look_on() -> None:
        while True:
            found = {name: footprint(pid) for name, pid in pids.items()}
            held.looks.append(Look(held.num_ended, found))
            on_look(held.looks[-1])
            await asyncio.sleep(every_s)

    looking = asyncio.ensure_future(look_on())
    try:
        yield
    finally:
        looking.cancel()


def _growth(name: str, looks: Sequence[Look]) -> Growth:
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


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """Of points that are all at one place, a level one."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    width = sum((x - mean_x) ** 2 for x, _ in points)
    per_x = sum((x - mean_x) * (y - mean_y) for x, y in points) / width if width else 0.0
    off = sum((y - mean_y - per_x * (x - mean_x)) ** 2 for x, y in points)
    return Line(per_x, (off / len(points)) ** 0.5)
