"""Routing on a cluster of two prefill and two decode nodes, and queue limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest

from baton.client import Answer, AsyncClient, BatonError, Client, Generation, Served
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.models import prompt_of
from tests.support.nodes import await_reported, card_at, prefixes_at

BLOCK_SIZE = 16
THRESHOLD = 24


@pytest.fixture(scope="module")
def wide_cluster(cluster_options: Callable[..., ClusterOptions]) -> Iterator[LocalCluster]:
    options = cluster_options(
        num_prefill=2,
        num_decode=2,
        router_arguments=("--local-prefill-below", str(THRESHOLD), "--no-kv-pulls"),
    )
    with LocalCluster(options) as running:
        yield running


@pytest.fixture
def client(wide_cluster: LocalCluster) -> Iterator[Client]:
    with Client(wide_cluster.address, timeout_s=60) as connected:
        yield connected


def greedy(max_tokens: int) -> Generation:
    return Generation(SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def served_of(answer: Answer) -> Served:
    assert answer.finish is not None
    return answer.finish.served


def test_a_session_stays_on_its_nodes_and_transfers_only_missing_blocks(client: Client) -> None:
    others = [prompt_of(50, seed=20 + number) for number in range(3)]
    history = prompt_of(70, seed=10)
    turns: list[Served] = []
    lengths: list[int] = []

    for number in range(4):
        answer = client.generate(history, greedy(20))
        turns.append(served_of(answer))
        lengths.append(len(history))
        history = (*history, *answer.token_ids, *prompt_of(40, seed=number))
        for other in (number, number + 1):  # so that round robin would split the session
            client.generate(others[other % 3], greedy(2))

    assert len({(turn.prefill_node, turn.decode_node) for turn in turns}) == 1
    for turn, length, before in zip(turns[1:], lengths[1:], lengths, strict=False):
        # All of the last turn but for its last token, whose KV was never needed.
        had = (before + 20 - 1) // BLOCK_SIZE
        assert turn.prompt_tokens_cached_on_decode == had * BLOCK_SIZE
        assert turn.kv_blocks == -(-length // BLOCK_SIZE) - had
        assert turn.prompt_tokens_computed_on_decode == 0


def test_sessions_spread_over_the_nodes(client: Client) -> None:
    served = [served_of(client.generate(prompt_of(60, seed=n), greedy(2))) for n in range(30, 34)]

    assert len({one.prefill_node for one in served}) == 2
    assert len({one.decode_node for one in served}) == 2


def test_few_missing_tokens_of_the_next_turn_are_computed_on_decode_with_a_reason(
    client: Client, wide_cluster: LocalCluster
) -> None:
    history = prompt_of(3 * BLOCK_SIZE, seed=40)
    first = client.generate(history, greedy(3 * BLOCK_SIZE + 1))  # its last token has no KV
    history = (*history, *first.token_ids[:-1])
    short, long = prompt_of(THRESHOLD - 1, seed=41), prompt_of(THRESHOLD, seed=42)
    [decode] = [one for one in wide_cluster.decodes if one.name == served_of(first).decode_node]
    await_reported(wide_cluster.address, decode.address)

    local = served_of(client.generate((*history, *short), greedy(3)))
    handed_over = served_of(client.generate((*history, *long), greedy(3)))

    assert local.kv_bytes == 0
    assert served_of(first).is_prefill_remote
    assert served_of(first).prefill_reason == ""
    assert local.prompt_tokens_computed_on_decode == THRESHOLD - 1
    assert f"{THRESHOLD - 1} tokens are missing" in local.prefill_reason
    assert handed_over.is_prefill_remote


def test_a_repeated_prompt_goes_to_the_node_that_reports_its_prefix(
    client: Client, wide_cluster: LocalCluster
) -> None:
    prompt = prompt_of(70, seed=50)
    first = served_of(client.generate(prompt, greedy(3)))
    [decode] = [one for one in wide_cluster.decodes if one.name == first.decode_node]

    repeated = until(
        lambda served: served.prompt_tokens_cached_on_decode == 4 * BLOCK_SIZE,
        lambda: served_of(client.generate(prompt, greedy(3))),
    )

    naming = card_at(decode.address).prefix_naming
    assert naming is not None
    assert set(naming.names(prompt, len(prompt))) <= prefixes_at(decode.address)
    assert repeated.decode_node == first.decode_node
    # Prefill has it, too, and computes as little.
    assert repeated.is_prefill_remote
    assert repeated.kv_blocks == 1


def until(is_wanted: Callable[[Served], bool], generate: Callable[[], Served]) -> Served:
    """Repeat until the router has received the nodes' prefix updates."""
    for _ in range(100):
        served = generate()
        if is_wanted(served):
            return served
    raise AssertionError(f"it did not come to that: {served}")


def test_a_full_queue_refuses_with_a_retry_delay_and_keeps_priorities(
    cluster_options: Callable[..., ClusterOptions],
) -> None:
    limits = ("--max-in-flight", "1", "--max-queue", "2")
    options = cluster_options(router_arguments=limits)

    with LocalCluster(options) as cluster:
        order, late, refusals = asyncio.run(send_concurrently(cluster.address))
        are_alive = [child.process.poll() is None for child in cluster.children]

    [refusal] = refusals
    assert order == sorted(order)
    assert len(order) == 2
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s > 0
    assert all(are_alive)


async def send_concurrently(address: str) -> tuple[list[int], BatonError, list[BatonError]]:
    """Send three requests to a queue of two while one is in flight; return the order served."""
    served: list[int] = []
    refusals: list[BatonError] = []

    async def generate(client: AsyncClient, priority: int) -> None:
        try:
            await client.generate(prompt_of(30), replace(greedy(4), priority=priority))
            served.append(priority)
        except BatonError as refusal:
            refusals.append(refusal)

    async with AsyncClient(address) as client, AsyncClient(address, timeout_s=0.1) as hasty:
        first = client.stream(prompt_of(30), greedy(450))
        await anext(first)
        with pytest.raises(BatonError) as late:  # its time is over before its turn comes
            await hasty.generate(prompt_of(30), greedy(4))
        requested = [asyncio.ensure_future(generate(client, priority)) for priority in (5, 1, 3)]
        await asyncio.wait(requested, return_when=asyncio.FIRST_COMPLETED)
        await first.aclose()
        await asyncio.gather(*requested)
    return served, late.value, refusals
