"""Serving benchmark: load on a running router or on started clusters, at one or more rates."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import partial

from baton.bench.client import LoadRun, send
from baton.bench.figures import ServeFigures, summarise
from baton.bench.load import (
    PlannedRequest,
    PromptLine,
    ServeBench,
    ServeLoad,
    plan,
    warm_up,
)
from baton.bench.running import Connect, OnProgress, stop_on_interrupt
from baton.cluster import ClusterOptions, LocalCluster


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    name: str
    rate: float
    requests: Sequence[PlannedRequest]
    run: LoadRun
    figures: ServeFigures


def bench_router(
    what: ServeBench, address: str, connect: Connect, on_progress: OnProgress
) -> list[MeasuredRun]:
    """Measure a running router. Return the completed runs, and the one that Ctrl-C interrupted."""
    return asyncio.run(_measure(what, {"router": address}, connect, on_progress))


def bench_clusters(
    what: ServeBench,
    options: dict[str, ClusterOptions],
    connect: Connect,
    on_progress: OnProgress,
) -> list[MeasuredRun]:
    """Start the clusters and send each the same requests; the order alternates by round."""
    with ExitStack() as lifetime:
        addresses = {
            name: lifetime.enter_context(LocalCluster(one)).address for name, one in options.items()
        }
        return asyncio.run(_measure(what, addresses, connect, on_progress))


async def _measure(
    what: ServeBench, addresses: dict[str, str], connect: Connect, on_progress: OnProgress
) -> list[MeasuredRun]:
    measured: list[MeasuredRun] = []
    async with AsyncExitStack() as lifetime, stop_on_interrupt() as stop:
        clients = {
            name: await lifetime.enter_async_context(connect(address))
            for name, address in addresses.items()
        }
        vocab_size = (await next(iter(clients.values())).model()).vocab_size
        for client in clients.values():
            for request in warm_up(what.load, vocab_size):
                await send(client, [replace(request, at_s=0.0)], stop=stop)
        for name, load in _runs(what, list(addresses)):
            if stop.is_set():
                break
            requests = plan(load, vocab_size, what.lines)
            rate = _true_rate(load, what.lines, requests)
            report = partial(on_progress, f"{name}, {rate:g}/s")
            report(0, len(requests))
            run = await send(
                clients[name],
                requests,
                concurrency=what.concurrency,
                stop=stop,
                on_progress=report,
            )
            figures = summarise(run, what.slo)
            measured.append(MeasuredRun(name, rate, requests, run, figures))
    return measured


def _true_rate(
    load: ServeLoad, lines: Sequence[PromptLine], requests: Sequence[PlannedRequest]
) -> float:
    """Return the actual rate: lines of a file may have send times of their own."""
    if all(line.at_s is None for line in lines) or not requests[-1].at_s:
        return load.rate
    return round(len(requests) / requests[-1].at_s, 2)


def _runs(what: ServeBench, names: Sequence[str]) -> list[tuple[str, ServeLoad]]:
    """Return the runs by cluster. Seeds differ between rounds, so that no prefix cache hits."""
    runs = []
    for number in range(what.num_rounds):
        for place, rate in enumerate(what.rates or [what.load.rate]):
            seed = what.load.seed + 1000 * number + place
            load = replace(what.load, rate=rate, seed=seed)
            order = names if number % 2 == 0 else names[::-1]
            runs += [(name, load) for name in order]
    return runs


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of the first cluster's figure to that of the second, over the rounds."""

    name: str
    first: float  # medians
    second: float
    ratio: float  # median of the rounds' ratios
    least: float
    most: float


RATIOS = (
    ("ttft_ms", "p50"),
    ("ttft_ms", "p99"),
    ("itl_ms", "p50"),
    ("itl_ms", "p90"),
    ("itl_ms", "p99"),
    ("itl_ms", "most"),
    ("tpot_ms", "p50"),
    ("e2e_ms", "p50"),
    ("output_tokens_per_s", ""),
    ("goodput_per_s", ""),
)


def compare(measured: Sequence[MeasuredRun], first: str, second: str) -> list[Ratio]:
    """Return the ratios over the rounds that both clusters completed."""
    whole = [one for one in measured if not one.figures.is_cut_short]
    pairs = list(
        zip(
            [one.figures for one in whole if one.name == first],
            [one.figures for one in whole if one.name == second],
            strict=False,
        )
    )
    ratios = []
    for name, part in RATIOS:
        values = [(_figure(a, name, part), _figure(b, name, part)) for a, b in pairs]
        rows = [(a, b) for a, b in values if a is not None and b]
        if rows:
            ratios.append(_ratio(f"{name} {part}".strip(), rows))
    return ratios


def _figure(figures: ServeFigures, name: str, part: str) -> float | None:
    value = getattr(figures, name)
    return getattr(value, part, None) if part else value


def _ratio(name: str, rows: Sequence[tuple[float, float]]) -> Ratio:
    shares = [a / b for a, b in rows]
    return Ratio(
        name,
        statistics.median(a for a, _ in rows),
        statistics.median(b for _, b in rows),
        statistics.median(shares),
        min(shares),
        max(shares),
    )
