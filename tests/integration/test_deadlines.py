"""Deadlines that expire while a process is frozen: the request ends on all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import grpc
import pytest

from baton.client import BatonError, Chunk, Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.rpc.node_info import NodeLoad
from tests.support.models import prompt_of
from tests.support.nodes import await_load, card_at, is_busy
from tests.support.suspended_processes import suspended

NOT_LOCAL = 300  # tokens of a prompt that decode does not compute, however busy prefill seems
LONG = Generation(SamplingParams(max_tokens=450, temperature=0.0, ignore_eos=True))
# Longer than it takes to come to where the request is to stand, on a busy machine too.
DEADLINE_S = 5.0
# Only a deadline may end a hand-off whose other side is frozen.
PATIENT = ("--kv-silence-s", "300", "--kv-lease-s", "100")


@pytest.fixture(scope="module")
def cluster(cluster_options: Callable[..., ClusterOptions]) -> Iterator[LocalCluster]:
    options = cluster_options()
    options = replace(options, node_arguments=(*options.node_arguments, *PATIENT))
    with LocalCluster(options) as running:
        with Client(running.address, timeout_s=60) as client:
            client.generate(prompt_of(20), replace(LONG, sampling=SamplingParams(2)))
        yield running
    codes = {child.name: child.process.returncode for child in running.children}
    assert set(codes.values()) == {0}, codes


def is_idle(load: NodeLoad) -> bool:
    return not is_busy(load)


def await_all_free(cluster: LocalCluster) -> None:
    for child in (*cluster.prefills, *cluster.decodes):
        await_load(child.address, partial(_is_all_free, card_at(child.address).num_blocks))


def _is_all_free(num_blocks: int, load: NodeLoad) -> bool:
    return is_idle(load) and load.num_free_blocks == num_blocks


def test_a_deadline_expires_while_prefill_is_frozen(cluster: LocalCluster) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes

    with Client(cluster.address, timeout_s=0.5) as hasty, suspended(prefill):
        with pytest.raises(BatonError) as failure:
            hasty.generate(prompt_of(NOT_LOCAL, seed=1), LONG)
        await_load(decode.address, is_idle)

    assert failure.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await_all_free(cluster)


def test_a_deadline_expires_while_decode_is_frozen(cluster: LocalCluster) -> None:
    [decode] = cluster.decodes

    with Client(cluster.address, timeout_s=DEADLINE_S) as hasty:
        for stream in streams_in_decode(hasty):
            with suspended(decode):
                failure = end_of(stream)
            if failure is not None:
                break

    assert isinstance(failure, BatonError), "every answer was whole before decode stood still"
    assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await_all_free(cluster)


def streams_in_decode(client: Client) -> Iterator[Iterator[Chunk]]:
    """Yield several streams that have a token from decode, since the first may end too soon."""
    for seed in range(2, 12):
        stream = client.stream(prompt_of(40, seed=seed), LONG)
        num_tokens = 0
        while num_tokens < 2:
            num_tokens += len(next(stream).token_ids)
        yield stream


def end_of(stream: Iterator[Chunk]) -> BatonError | None:
    """Return the stream's error, or None if the answer is complete."""
    try:
        assert [chunk for chunk in stream if chunk.finish is not None]
    except BatonError as failure:
        return failure
    return None


def test_nodes_enforce_a_deadline_while_the_router_is_frozen(cluster: LocalCluster) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes

    with (
        Client(cluster.address, timeout_s=DEADLINE_S) as hasty,
        ThreadPoolExecutor(1) as asking,
        suspended(prefill),
    ):
        requested = asking.submit(hasty.generate, prompt_of(NOT_LOCAL, seed=3), LONG)
        await_load(decode.address, is_busy)
        with suspended(cluster.router):
            await_load(decode.address, is_idle)
            failure = requested.exception()

    assert isinstance(failure, BatonError)
    assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await_all_free(cluster)
