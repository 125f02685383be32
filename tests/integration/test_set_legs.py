"""Changes of the legs that nodes offer, under load: 1P2D becomes 2P1D, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.client import Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.legs import LegKind
from baton.core.sampling import SamplingParams
from tests.support.baton_command import run_baton
from tests.support.client_load import ClientRequest, Load
from tests.support.models import prompt_of, reference_choices
from tests.support.nodes import legs_at, set_legs

NUM_TOKENS = 30
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("drain_timeout_s", [0.0, 30.0], ids=["moving", "draining"])
def test_a_decode_node_computes_prompts_for_a_while_and_loses_no_token(
    cluster_options: Callable[..., ClusterOptions], model_folder: Path, drain_timeout_s: float
) -> None:
    requests = [
        ClientRequest(prompt_of(20 + number, seed=number), Generation(SAMPLING))
        for number in range(40)
    ]
    with LocalCluster(cluster_options(num_decode=2)) as cluster:
        node = cluster.decodes[0]
        with Load(cluster.address, requests, num_clients=2) as load:
            for _ in range(2):
                load.until(lambda answer: answer.finish.served.decode_node == node.name)
                offered = set_legs(node.address, [LegKind.PREFILL], drain_timeout_s)
                assert offered == legs_at(node.address)
                assert LegKind.DECODE not in offered
                load.until(lambda answer: answer.finish.served.prefill_node == node.name)
                run_baton(
                    *("nodes", "set-legs", node.name, "decode", "--address", cluster.address),
                    *("--drain-timeout-s", str(drain_timeout_s)),
                )
                assert LegKind.PREFILL not in legs_at(node.address)
            load.until(lambda answer: answer.finish.served.decode_node == node.name)

    assert load.errors == []
    for answer in load.answers:
        token_ids, prompt = list(answer.token_ids), answer.request.prompt
        assert token_ids == reference_choices(model_folder, prompt, token_ids, NUM_TOKENS)
