"""Overload with three times the capacity: requests are served, queued by priority or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from baton.client import AsyncClient, BatonError, Generation, Retries
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.models import VARIANTS, make_model_folder, prompt_of
from tests.support.scrapes import scraped
from tests.support.suspended_processes import suspended
from tests.support.waits import reaches, until

BATCH_SIZE, QUEUE_SIZE = 4, 16  # requests in the decode node's batch, and those that may wait
NUM_ORDINARY, NUM_URGENT = 3 * (BATCH_SIZE + QUEUE_SIZE), 4
GENERATION = Generation(SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    folder = make_model_folder(tmp_path / "tiny", VARIANTS["llama"])
    nodes = ("--kv-cache-memory", "4MiB", "--threads", "1", "--max-num-seqs", str(BATCH_SIZE))
    # While a node is suspended, its peers must not give it up.
    patient = ("--kv-silence-s", "300", "--kv-lease-s", "100")
    router = ("--max-queue", str(QUEUE_SIZE), "--metrics-port", "0")
    options = ClusterOptions(
        str(folder), node_arguments=(*nodes, *patient), router_arguments=router
    )
    with LocalCluster(options) as running:
        yield running


@dataclass(slots=True)
class ConcurrentRequests:
    """Requests sent at the same time, and their outcomes in the order in which they arrived."""

    client: AsyncClient
    served: list[int] = field(default_factory=list)  # priorities
    token_ids: set[tuple[int, ...]] = field(default_factory=set)
    refusals: list[BatonError] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def send(self, count: int, priority: int) -> None:
        self._tasks += [asyncio.create_task(self._send(priority)) for _ in range(count)]

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)

    async def _send(self, priority: int) -> None:
        try:
            generation = replace(GENERATION, priority=priority)
            answer = await self.client.generate(prompt_of(30), generation)
        except BatonError as refusal:
            self.refusals.append(refusal)
            return
        self.served.append(priority)
        self.token_ids.add(tuple(answer.token_ids))

    def check_outcomes(self) -> None:
        """Check that each request was served with the same tokens or refused with a delay."""
        assert len(self.served) + len(self.refusals) == len(self._tasks)
        assert len(self.token_ids) == 1
        assert {(one.code, one.reason) for one in self.refusals} == {
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        }
        assert all(one.retry_after_s for one in self.refusals)


async def overload(address: str) -> ConcurrentRequests:
    """Send all requests at once."""
    async with AsyncClient(address, retries=Retries(max_attempts=1)) as client:
        requests = ConcurrentRequests(client)
        requests.send(NUM_ORDINARY, priority=0)
        await requests.finish()
    return requests


async def overtake(cluster: LocalCluster) -> ConcurrentRequests:
    """Let urgent requests join a queue of ordinary ones, and more ordinary ones find it full.

    The decode node stands still until all have arrived.
    """
    async with AsyncClient(cluster.address, retries=Retries(max_attempts=1)) as client:
        requests = ConcurrentRequests(client)
        with suspended(*cluster.decodes):
            requests.send(BATCH_SIZE + QUEUE_SIZE - NUM_URGENT, priority=0)
            await await_queue(cluster, QUEUE_SIZE - NUM_URGENT)
            requests.send(NUM_URGENT, priority=-1)
            await await_queue(cluster, QUEUE_SIZE)
            requests.send(NUM_ORDINARY - BATCH_SIZE - QUEUE_SIZE, priority=0)
            await until(
                lambda: len(requests.refusals), reaches(NUM_ORDINARY - BATCH_SIZE - QUEUE_SIZE)
            )
        await requests.finish()
    return requests


async def await_queue(cluster: LocalCluster, depth: int) -> None:
    await asyncio.to_thread(
        scraped, cluster.router, lambda scrape: scrape.total("baton_queue_depth") == depth
    )


def test_every_request_is_served_or_gets_a_retry_delay(cluster: LocalCluster) -> None:
    requests = asyncio.run(overload(cluster.address))

    requests.check_outcomes()
    assert len(requests.served) >= BATCH_SIZE + QUEUE_SIZE


def test_high_priority_requests_overtake_all_queued_ones(cluster: LocalCluster) -> None:
    requests = asyncio.run(overtake(cluster))

    requests.check_outcomes()
    assert len(requests.served) == BATCH_SIZE + QUEUE_SIZE
    assert requests.served.count(-1) == NUM_URGENT
    # Requests that ran already, and those that run beside the last urgent one, may end first.
    last = len(requests.served) - requests.served[::-1].index(-1)
    assert last - NUM_URGENT <= 2 * BATCH_SIZE
