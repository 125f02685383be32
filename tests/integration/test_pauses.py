"""Pauses of nodes under load, in each mode: no request is lost, and no token differs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.pause_mode import PauseMode
from baton.core.sampling import SamplingParams
from baton.rpc.node_info import NodeLoad
from tests.support.baton_command import call_baton
from tests.support.client_load import ClientAnswer, ClientRequest, Load
from tests.support.models import prompt_of, reference_choices
from tests.support.nodes import await_all_free, load_at, set_pause
from tests.support.waits import await_value

NUM_TOKENS = 60
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
REQUESTS = [
    ClientRequest(prompt_of(20 + number, seed=number), Generation(SAMPLING)) for number in range(20)
]


@pytest.fixture(scope="module")
def cluster(cluster_options: Callable[..., ClusterOptions]) -> Iterator[LocalCluster]:
    options = cluster_options(router_arguments=("--node-patience-s", "60"))
    with LocalCluster(options) as cluster:
        yield cluster


def test_streams_of_a_paused_decode_node_end_with_the_same_tokens_after_it(
    cluster: LocalCluster, model_folder: Path
) -> None:
    [decode] = cluster.decodes
    with Load(cluster.address, REQUESTS, num_clients=4) as load:
        for mode in PauseMode:
            load.until(is_any)
            order(cluster, "pause", decode.name, "--mode", mode)
            await_paused(cluster, decode.name)
            paused = await_stopped(decode.address, keeps_running=mode is PauseMode.KEEP)
            # Copies to host memory that have begun go on.
            now = load_at(decode.address).totals
            assert replace(now, tiers=()) == replace(paused.totals, tiers=())
            order(cluster, "resume", decode.name)
        load.until(is_any)
    assert_right(load, model_folder)
    assert_all_free(cluster)


def test_decode_computes_the_prompts_while_the_prefill_node_is_paused(
    cluster: LocalCluster, model_folder: Path
) -> None:
    [prefill] = cluster.prefills
    with Load(cluster.address, REQUESTS, num_clients=4) as load:
        for mode in PauseMode:
            set_pause(prefill.address, mode)
            await_paused(cluster, prefill.name)
            # All clients of the load may have requests that the paused node keeps.
            with Load(cluster.address, REQUESTS, num_clients=1) as later:
                later.until(lambda answer: not answer.finish.served.is_prefill_remote)
            assert_right(later, model_folder)
            set_pause(prefill.address, None)
            load.until(lambda answer: answer.finish.served.is_prefill_remote)
    assert_right(load, model_folder)
    assert_all_free(cluster)


def order(cluster: LocalCluster, *arguments: str) -> str:
    done = call_baton("nodes", *arguments, "--address", cluster.address)
    assert done.returncode == 0, done.stderr
    return done.stdout


def states(cluster: LocalCluster) -> dict[str, str]:
    nodes = json.loads(order(cluster, "--once", "--json"))["nodes"]
    return {node["node_id"]: node["state"] for node in nodes}


def await_paused(cluster: LocalCluster, name: str) -> None:
    await_value(
        lambda: states(cluster)[name],
        lambda state: state == "paused",
        what="report of the pause",
    )


def await_stopped(address: str, *, keeps_running: bool) -> NodeLoad:
    """Return the load of a paused node. It is published a moment after the pause."""
    return await_value(
        lambda: load_at(address),
        lambda load: load.is_paused and (keeps_running or load.num_running == 0),
        what="load of the paused node",
    )


def is_any(_: ClientAnswer) -> bool:
    return True


def assert_right(load: Load, model_folder: Path) -> None:
    assert load.errors == []
    for answer in load.answers:
        token_ids, prompt = list(answer.token_ids), answer.request.prompt
        assert token_ids == reference_choices(model_folder, prompt, token_ids, NUM_TOKENS)


def assert_all_free(cluster: LocalCluster) -> None:
    for child in (*cluster.prefills, *cluster.decodes):
        await_all_free(child.address)
