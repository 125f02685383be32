"""Overload benchmark: the peak rate of a cluster, then a multiple of it."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from baton.bench.load import FIRST_PLAIN_TOKEN
from baton.client import AsyncClient, BatonError, Generation, Retries
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.errors import InvalidConfig
from baton.core.sampling import SamplingParams
from benchmarks.processes import cpu_s

ORDINARY, URGENT = 0, -1  # priorities; lower values run earlier
CLIENTS = "clients"


@dataclass(frozen=True, slots=True)
class OverloadBench:
    cluster: ClusterOptions
    factor: float = 3.0  # of the peak
    seconds: float = 20.0
    num_clients: int = 128  # closed-loop clients that measure the peak
    patience_s: float = 8.0  # deadline of each request under overload
    urgent_share: float = 0.1
    prompt_tokens: int = 64
    answer_tokens: int = 32
    seed: int = 0
    node_cpus: tuple[int, ...] = ()  # reserved for the nodes, as if clients ran elsewhere


@dataclass(slots=True)
class OverloadRequest:
    """One request as seen by its client. Times are monotonic."""

    priority: int
    sent_s: float
    first_token_s: float | None = None
    ended_s: float = 0.0
    reason: str = ""  # empty: served
    retry_after_s: float | None = None

    @property
    def is_refused(self) -> bool:
        """Return whether the router refused the request with a retry-after."""
        return self.retry_after_s is not None


@dataclass(frozen=True, slots=True)
class PriorityOutcome:
    """Outcome of the requests of one priority. Times in ms."""

    priority: str
    sent: int
    served: int
    refused: int
    unserved: int  # neither served nor refused with a retry-after
    first_token_p50_ms: float | None
    first_token_p99_ms: float | None
    refusal_p50_ms: float | None
    refusal_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class CoreUse:
    """CPU use of one process in cores. Clients and refusals take CPU time, too."""

    process: str
    at_peak: float
    beyond: float


@dataclass(frozen=True, slots=True)
class Overloaded:
    peak_per_s: float
    sent_per_s: float
    served_per_s: float
    kinds: Sequence[PriorityOutcome]
    reasons: Mapping[str, int]
    cores: Sequence[CoreUse] = ()

    @property
    def share_of_peak(self) -> float:
        return self.served_per_s / self.peak_per_s


@dataclass(slots=True)
class _OverloadLoad:
    client: AsyncClient
    bench: OverloadBench
    vocab_size: int
    requests: list[OverloadRequest] = field(default_factory=list)
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.bench.seed)

    async def send(self, priority: int, timeout_s: float | None) -> None:
        bench = self.bench
        sampling = SamplingParams(max_tokens=bench.answer_tokens, temperature=0.0, ignore_eos=True)
        generation = Generation(sampling, priority=priority)
        plain = range(FIRST_PLAIN_TOKEN, self.vocab_size)
        prompt = tuple(self.draw.choices(plain, k=bench.prompt_tokens))
        request = OverloadRequest(priority, time.monotonic())
        self.requests.append(request)
        try:
            stream = self.client.stream(prompt, generation, timeout_s=timeout_s)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids and request.first_token_s is None:
                        request.first_token_s = time.monotonic()
        except BatonError as error:
            request.reason = error.reason or error.code.name
            request.retry_after_s = error.retry_after_s
        request.ended_s = time.monotonic()


async def run(bench: OverloadBench) -> Overloaded:
    """Run the benchmark. Raises named errors."""
    with _avoiding(bench.node_cpus):
        return await _run(bench)


@contextmanager
def _avoiding(cpus: Collection[int]) -> Iterator[None]:
    """Keep this process, and the processes it starts, off these cores within the block."""
    allowed = os.sched_getaffinity(0)
    rest = allowed - set(cpus)
    if not rest:
        raise InvalidConfig(
            f"no core is left for router and clients: nodes take all of {sorted(allowed)}"
        )
    os.sched_setaffinity(0, rest)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


async def _run(bench: OverloadBench) -> Overloaded:
    cluster = LocalCluster(bench.cluster)
    await asyncio.to_thread(cluster.__enter__)
    try:
        async with AsyncClient(cluster.address, retries=Retries(max_attempts=1)) as client:
            vocab_size = (await client.model()).vocab_size
            await _peak(_OverloadLoad(client, bench, vocab_size), bench.seconds / 4)  # warm-up
            async with _cores_used(cluster, bench.seconds) as at_peak:
                peak_per_s = await _peak(_OverloadLoad(client, bench, vocab_size), bench.seconds)
            load = _OverloadLoad(client, bench, vocab_size)
            async with _cores_used(cluster, bench.seconds) as beyond:
                began_s = await _beyond(load, bench.factor * peak_per_s)
            found = overloaded(load.requests, began_s, bench.seconds, peak_per_s)
            uses = [CoreUse(name, at_peak[name], beyond[name]) for name in at_peak]
            return replace(found, cores=uses)
    finally:
        await asyncio.to_thread(cluster.__exit__, None, None, None)


@asynccontextmanager
async def _cores_used(cluster: LocalCluster, seconds: float) -> AsyncIterator[dict[str, float]]:
    """Yield a dict that gets the CPU use by process over the last three quarters of the block."""
    pids = {child.name: child.process.pid for child in cluster.children} | {CLIENTS: os.getpid()}
    used: dict[str, float] = {}

    async def watch() -> None:
        await asyncio.sleep(seconds / 4)
        before, began_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
        await asyncio.sleep(began_s + 3 * seconds / 4 - time.monotonic())
        took_s = time.monotonic() - began_s
        used.update({name: (cpu_s(pid) - before[name]) / took_s for name, pid in pids.items()})

    watching = asyncio.ensure_future(watch())
    try:
        yield used
        await watching
    finally:
        watching.cancel()


async def _peak(load: _OverloadLoad, seconds: float) -> float:
    """Return the requests per second that the closed-loop clients get served."""
    began_s = time.monotonic()

    async def send_requests() -> None:
        while time.monotonic() < began_s + seconds:
            await load.send(ORDINARY, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(load.bench.num_clients):
            group.create_task(send_requests())
    return _served_per_s(load.requests, began_s, seconds)


async def _beyond(load: _OverloadLoad, per_s: float) -> float:
    """Send requests open-loop at a rate; return the time of the first."""
    bench, began_s = load.bench, time.monotonic()
    due_s = began_s
    async with asyncio.TaskGroup() as group:
        while due_s < began_s + bench.seconds:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            priority = URGENT if load.draw.random() < bench.urgent_share else ORDINARY
            group.create_task(load.send(priority, bench.patience_s))
            due_s += load.draw.expovariate(per_s)
    return began_s


def _served_per_s(requests: Sequence[OverloadRequest], began_s: float, seconds: float) -> float:
    """Return the rate over the last three quarters, which exclude the ramp-up."""
    first_s, last_s = began_s + seconds / 4, began_s + seconds
    served = [one for one in requests if not one.reason and first_s <= one.ended_s < last_s]
    return len(served) / (last_s - first_s)


def overloaded(
    requests: Sequence[OverloadRequest], began_s: float, seconds: float, peak_per_s: float
) -> Overloaded:
    return Overloaded(
        peak_per_s=peak_per_s,
        sent_per_s=len(requests) / seconds,
        served_per_s=_served_per_s(requests, began_s, seconds),
        kinds=list(_kinds(requests)),
        reasons=dict(Counter(one.reason for one in requests if one.reason)),
    )


def _kinds(requests: Sequence[OverloadRequest]) -> Iterator[PriorityOutcome]:
    for priority, name in ((URGENT, "urgent"), (ORDINARY, "ordinary")):
        matching = [one for one in requests if one.priority == priority]
        first_ms = [
            (one.first_token_s - one.sent_s) * 1000
            for one in matching
            if one.first_token_s is not None
        ]
        refused_ms = [(one.ended_s - one.sent_s) * 1000 for one in matching if one.is_refused]
        num_served = sum(not one.reason for one in matching)
        yield PriorityOutcome(
            name,
            len(matching),
            num_served,
            len(refused_ms),
            len(matching) - num_served - len(refused_ms),
            *_quantiles(first_ms),
            *_quantiles(refused_ms),
        )


def _quantiles(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the median and the 99th percentile."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (None, None)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]
