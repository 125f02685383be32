"""Pauses of nodes under load, in each mode: no request is lost, and no token differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.client import Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.pause_mode import PauseMode
from baton.core.sampling import SamplingParams
from tests.support.client_load import ClientAnswer, ClientRequest, Load
from tests.support.models import prompt_of, reference_choices
from tests.support.nodes import await_all_free, is_busy, load_at, set_pause

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
            set_pause(decode.address, mode)
            paused = load_at(decode.address)
            assert paused.is_paused
            assert is_busy(paused) is (mode is PauseMode.KEEP)
            assert load_at(decode.address).totals == paused.totals
            set_pause(decode.address, None)
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
            load.until(lambda answer: not answer.finish.served.is_prefill_remote)
            set_pause(prefill.address, None)
            load.until(lambda answer: answer.finish.served.is_prefill_remote)
    assert_right(load, model_folder)
    assert_all_free(cluster)


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
