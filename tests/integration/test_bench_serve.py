"""`baton bench serve` against real processes: its counts match the served requests."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.bench.benchmark import bench_clusters, bench_router
from baton.bench.client import Sample, send
from baton.bench.load import (
    Arrivals,
    PlannedRequest,
    PromptLine,
    ServeBench,
    ServeLoad,
    parse_lengths,
)
from baton.bench.plots import draw
from baton.client import AsyncClient, Retries
from baton.cluster import LocalCluster

LOAD = ServeLoad(
    rate=50,
    num_requests=8,
    prompt=parse_lengths("mix:20x3,100x1"),
    output=parse_lengths("6"),
    num_warm_up=1,
)


def connect(address: str) -> AsyncClient:
    return AsyncClient(address, timeout_s=60, retries=Retries(max_attempts=1))


def requests_of(*prompt_lens: int) -> list[PlannedRequest]:
    return [
        PlannedRequest(number, 0.0, tuple(range(1, length + 1)), 4, seed=number)
        for number, length in enumerate(prompt_lens)
    ]


def test_every_request_is_answered_with_its_served_summary(cluster: LocalCluster) -> None:
    reported: list[tuple[str, int, int]] = []

    def on_progress(*progress: Any) -> None:
        reported.append(progress)

    [measured] = bench_router(ServeBench(LOAD), cluster.address, connect, on_progress)

    figures = measured.figures
    assert (figures.num_answered, figures.errors) == (8, {})
    assert figures.num_remote == 8
    assert figures.kv_bytes > 0
    assert sum(count for one in measured.run.samples for _, count in one.arrivals) == 8 * 6
    assert [num_ended for _, num_ended, _ in reported] == list(range(9))
    assert measured.run.lags_s


def test_refusals_are_counted_by_reason_and_other_requests_are_answered(
    cluster: LocalCluster,
) -> None:
    async def scenario() -> list[Sample]:
        async with connect(cluster.address) as client:
            return (await send(client, requests_of(5, 100_000, 6))).samples

    samples = sorted(asyncio.run(scenario()), key=lambda one: one.number)

    assert [one.error for one in samples] == [None, "INVALID_REQUEST", None]


def test_waiting_time_counts_from_the_planned_start(cluster: LocalCluster) -> None:
    async def scenario() -> list[Sample]:
        async with connect(cluster.address) as client:
            return (await send(client, requests_of(5, 6, 7), concurrency=1)).samples

    first, second, third = asyncio.run(scenario())

    assert [one.planned_s for one in (first, second, third)] == [0, 0, 0]
    assert first.ended_s <= second.sent_s <= second.ended_s <= third.sent_s


def test_an_interrupt_prints_the_results_so_far(cluster: LocalCluster) -> None:
    load = replace(LOAD, num_requests=100_000, arrivals=Arrivals.CONSTANT)

    def interrupt(_name: str, num_ended: int, _num_planned: int) -> None:
        if num_ended == 3:
            os.kill(os.getpid(), signal.SIGINT)

    [measured] = bench_router(ServeBench(load), cluster.address, connect, interrupt)

    assert measured.figures.is_cut_short
    assert 3 <= measured.figures.num_answered < 1000
    assert measured.figures.ttft_ms is not None


def test_the_rate_of_timed_prompts_is_reported(cluster: LocalCluster) -> None:
    lines = [PromptLine("a", 2, at_s=0.0), PromptLine((1, 2, 3), 2, at_s=0.5)]
    what = ServeBench(replace(LOAD, num_requests=2), lines=lines)

    [measured] = bench_router(what, cluster.address, connect, lambda *_: None)

    assert measured.rate == 4
    assert [one.prompt for one in measured.requests] == ["a", (1, 2, 3)]


def test_rates_are_run_in_sequence_and_plotted(cluster: LocalCluster, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    what = ServeBench(LOAD, rates=(20, 40))

    measured = bench_router(what, cluster.address, connect, lambda *_: None)

    assert [one.rate for one in measured] == [20, 40]
    assert measured[0].requests[0].prompt != measured[1].requests[0].prompt
    paths = draw(measured, tmp_path / "plots")
    assert [path.name for path in paths] == ["latency.png", "timeline.png", "goodput.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.slow
def test_two_clusters_get_the_same_requests_in_alternation(cluster_options) -> None:  # type: ignore[no-untyped-def]
    options = {
        "disaggregated": cluster_options(),
        "colocated": cluster_options(is_colocated=True),
    }
    what = ServeBench(LOAD, num_rounds=2)

    measured = bench_clusters(what, options, connect, lambda *_: None)

    names = ["disaggregated", "colocated", "colocated", "disaggregated"]
    assert [one.name for one in measured] == names
    assert measured[0].requests == measured[1].requests
    assert measured[1].requests != measured[2].requests
    assert [one.figures.num_remote for one in measured] == [8, 0, 0, 8]
