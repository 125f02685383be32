"""Tracing benchmark: the same load alternately on a cluster with tracing and one without."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

from baton.client import AsyncClient, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.telemetry.tracing.spans import TraceContext
from baton.telemetry.tracing.tracer import new_span_id, new_trace_id

# Trace ratio by name; None: a cluster without tracing. "off again" shows the noise of the
# measurement.
RATIOS = {"off": None, "off again": None, "1 %": 0.01, "100 %": 1.0}
OFF = "off"
SURE = 0.95


@dataclass(frozen=True, slots=True)
class TraceBench:
    model: str
    num_streams: int = 16
    num_requests: int = 40  # in each round
    prompt_tokens: int = 64
    answer_tokens: int = 24
    num_rounds: int = 15  # many short ones, since adjacent rounds see the same machine drift
    node_arguments: tuple[str, ...] = ("--kv-cache-memory", "128MiB", "--threads", "1")


@dataclass(slots=True)
class TraceLoad:
    """Results of one trace ratio by round."""

    tokens_per_s: list[float] = field(default_factory=list)
    intervals_s: list[float] = field(default_factory=list)  # between tokens


@dataclass(frozen=True, slots=True)
class TraceFigure:
    tracing: str
    tokens_per_s: float  # median of the rounds
    of_off: float  # median ratio to the round without tracing next to it
    at_least: float  # with at_most: 95 % confidence interval of the median ratio
    at_most: float
    p99_itl_ms: float


OnRound = Callable[[str, float], None]


def run(bench: TraceBench, on_round: OnRound) -> list[TraceFigure]:
    loads = {name: TraceLoad() for name in RATIOS}
    with ExitStack() as lifetime:
        folder = lifetime.enter_context(TemporaryDirectory(prefix="baton-bench-"))
        off = lifetime.enter_context(LocalCluster(_options(bench, "off")))
        on = lifetime.enter_context(LocalCluster(_options(bench, folder)))
        addresses = {name: (off if ratio is None else on).address for name, ratio in RATIOS.items()}
        for address in (off.address, on.address):
            asyncio.run(_round(bench, address, None, TraceLoad(), seed=0))  # warms up
        for number in range(bench.num_rounds):
            # Rotate the order, so that drift of the machine affects all ratios alike.
            first = number % len(RATIOS)
            names = list(RATIOS)[first:] + list(RATIOS)[:first]
            for place, name in enumerate(names, start=1):
                load, seed = loads[name], number * len(names) + place
                asyncio.run(_round(bench, addresses[name], RATIOS[name], load, seed=seed))
                on_round(name, load.tokens_per_s[-1])
    return [figure(name, load, loads[OFF]) for name, load in loads.items()]


def _options(bench: TraceBench, trace_dir: str) -> ClusterOptions:
    traces = ("--trace-dir", trace_dir)
    return ClusterOptions(
        model=bench.model,
        node_arguments=(*bench.node_arguments, *traces),
        router_arguments=traces,
    )


async def _round(
    bench: TraceBench, address: str, ratio: float | None, load: TraceLoad, *, seed: int
) -> None:
    """Send one round with new prompts of equal length, so that no prefix cache hits."""
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(5, 500) for _ in range(bench.prompt_tokens)]
        for _ in range(bench.num_requests)
    ]
    is_traced = [draw.random() < (ratio or 0) for _ in prompts]
    waiting = asyncio.Semaphore(bench.num_streams)
    async with AsyncClient(address, timeout_s=120) as client:

        async def send(number: int) -> int:
            async with waiting:
                return await _stream(client, bench, prompts[number], is_traced[number], load)

        began_s = time.perf_counter()
        counts = await asyncio.gather(*(send(number) for number in range(bench.num_requests)))
        load.tokens_per_s.append(sum(counts) / (time.perf_counter() - began_s))


async def _stream(
    client: AsyncClient, bench: TraceBench, prompt: list[int], is_traced: bool, load: TraceLoad
) -> int:
    sampling = SamplingParams(max_tokens=bench.answer_tokens, temperature=0.0, ignore_eos=True)
    context = TraceContext(new_trace_id(), new_span_id(), is_traced)
    num_tokens, last_s = 0, None
    async for chunk in client.stream(prompt, Generation(sampling, traceparent=context.traceparent)):
        if not chunk.token_ids:
            continue
        now_s = time.perf_counter()
        num_tokens += len(chunk.token_ids)
        if last_s is not None:
            load.intervals_s += [(now_s - last_s) / len(chunk.token_ids)] * len(chunk.token_ids)
        last_s = now_s
    return num_tokens


def figure(name: str, load: TraceLoad, off: TraceLoad) -> TraceFigure:
    pairs = zip(load.tokens_per_s, off.tokens_per_s, strict=True)
    ratios = [traced / untraced for traced, untraced in pairs]
    at_least, at_most = median_bounds(ratios)
    return TraceFigure(
        tracing=name,
        tokens_per_s=statistics.median(load.tokens_per_s),
        of_off=statistics.median(ratios),
        at_least=at_least,
        at_most=at_most,
        p99_itl_ms=statistics.quantiles(load.intervals_s, n=100)[98] * 1000,
    )


def median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return a distribution-free confidence interval of the median with level SURE.

    The n-th smallest of N values exceeds the median with the probability of fewer than n heads in
    N coin tosses. With fewer than six values the interval is their range, at a lower level.
    """
    ordered, num = sorted(values), len(values)
    chance, left_out = 0.0, 0
    for place in range(num // 2):
        chance += 2 * math.comb(num, place) / 2**num  # at either end
        if chance > 1 - SURE:
            break
        left_out = place
    return ordered[left_out], ordered[num - 1 - left_out]
