"""Overload with three times the capacity: requests are served, queued by priority or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import grpc
import pytest

from baton.client import AsyncClient, BatonError, Generation, Retries
from baton.cluster import ClusterOptions, LocalCluster
from engine.sampling import SamplingParams
from tests.support.models import VARIANTS, make_model_folder, prompt_of

BATCH_SIZE, QUEUE_SIZE = 4, 16  # requests in the decode node's batch, and those that may wait
NUM_ORDINARY, NUM_URGENT = 3 * (BATCH_SIZE + QUEUE_SIZE), 4
GENERATION = Generation(SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_model_folder(tmp_path_factory.mktemp("models") / "tiny", VARIANTS["llama"])
    nodes = ("--kv-cache-memory", "4MiB", "--threads", "1", "--max-num-seqs", str(BATCH_SIZE))
    options = ClusterOptions(
        str(folder), node_arguments=nodes, router_arguments=("--max-queue", str(QUEUE_SIZE))
    )
    with LocalCluster(options) as cluster:
        yield cluster.address


@dataclass(slots=True)
class ConcurrentRequests:
    """Outcomes of concurrent requests, in the order in which they arrived."""

    served: list[int] = field(default_factory=list)  # priorities
    token_ids: set[tuple[int, ...]] = field(default_factory=set)
    refusals: list[BatonError] = field(default_factory=list)

    async def send(self, client: AsyncClient, priority: int) -> None:
        try:
            answer = await client.generate(prompt_of(30), replace(GENERATION, priority=priority))
        except BatonError as refusal:
            self.refusals.append(refusal)
            return
        self.served.append(priority)
        self.token_ids.add(tuple(answer.token_ids))


async def overload(address: str) -> tuple[ConcurrentRequests, int]:
    """Send all ordinary requests at once, and the urgent ones as soon as the queue has room.

    Return the outcomes, and the number of requests that had been served before the urgent ones.
    """
    requests = ConcurrentRequests()
    async with AsyncClient(address, retries=Retries(max_attempts=1)) as client:
        tasks = [asyncio.ensure_future(requests.send(client, 0)) for _ in range(NUM_ORDINARY)]
        while len(left := [one for one in tasks if not one.done()]) > QUEUE_SIZE - NUM_URGENT:
            await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        num_before = len(requests.served)
        tasks += [asyncio.ensure_future(requests.send(client, -1)) for _ in range(NUM_URGENT)]
        await asyncio.gather(*tasks)
    return requests, num_before


def test_every_request_is_served_or_gets_a_retry_delay_and_urgent_ones_go_first(
    address: str,
) -> None:
    requests, num_before = asyncio.run(overload(address))

    assert len(requests.served) + len(requests.refusals) == NUM_ORDINARY + NUM_URGENT
    assert len(requests.served) >= BATCH_SIZE + QUEUE_SIZE
    assert len(requests.token_ids) == 1
    assert {(one.code, one.reason) for one in requests.refusals} == {
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    }
    assert all(one.retry_after_s for one in requests.refusals)
    assert requests.served.count(-1) == NUM_URGENT
    # Requests that ran already, and those admitted in the meantime, may end first.
    last = len(requests.served) - requests.served[::-1].index(-1)
    assert last - num_before - NUM_URGENT <= 2 * BATCH_SIZE
