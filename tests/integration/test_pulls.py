"""Prefixes that real nodes pull from each other, instead of computing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.legs import LegKind
from baton.llm import LLM
from tests.support.engine_nodes import EngineNode
from tests.support.engine_pair import Pair, PairOptions, all_free, greedy, source_of
from tests.support.families import STATE_VARIANTS
from tests.support.models import make_model_folder, prompt_of, reference_greedy
from tests.support.nodes import await_load, await_reported, card_at

BLOCK_SIZE = 16
NUM_TOKENS = 24

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(model_folder: Path) -> Iterator[Pair]:
    with Pair(PairOptions(model_folder)) as running:
        yield running


@pytest.fixture
def other(model_folder: Path, pair: Pair) -> Iterator[EngineNode]:
    """Run another prefill node, which has not learnt yet how fast it computes this tiny model."""
    options = replace(PairOptions(model_folder).of(LegKind.PREFILL), node_id="prefill-2")
    node = EngineNode(LegKind.PREFILL, options)
    try:
        yield node.await_ready()
    finally:
        code = node.end()
    assert code == 0


def expected(local: LLM, prompt: Sequence[int]) -> list[int]:
    return local.generate(list(prompt), greedy(NUM_TOKENS))[0].token_ids


def num_whole(num_tokens: int) -> int:
    """Return the number of these tokens that fill whole blocks."""
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


def await_free(pair: Pair, other: EngineNode) -> None:
    pair.await_all_free()
    await_load(other.address, all_free(card_at(other.address)))


def await_prefills_reported(cluster: LocalCluster) -> None:
    for node in cluster.prefills:
        await_reported(cluster.address, node.address)


def test_a_prefill_node_pulls_a_prompt_that_another_has_computed(
    pair: Pair, other: EngineNode, local: LLM
) -> None:
    prompt = prompt_of(390, seed=201)
    pair.acquaint_prefill(prompt)

    answer = pair.answer_by(other, prompt, greedy(NUM_TOKENS), source_of(pair.p, 390))

    assert answer.token_ids == expected(local, prompt)
    assert answer.prefill.summary.prompt_tokens_loaded == {"peer": num_whole(390)}
    assert other.num_tokens_run == 390 - num_whole(390)
    await_free(pair, other)


def test_a_prefill_node_pulls_the_answer_that_a_decode_node_wrote(
    pair: Pair, other: EngineNode, local: LLM
) -> None:
    prompt = prompt_of(100, seed=202)
    first = pair.answer(prompt, greedy(NUM_TOKENS))
    turn = (*prompt, *first.token_ids, *prompt_of(40, seed=203))
    num_known = num_whole(100 + NUM_TOKENS - 1)  # the KV of the last token is not computed

    second = pair.answer_by(other, turn, greedy(NUM_TOKENS), source_of(pair.d, num_known))

    assert second.token_ids == expected(local, turn)
    assert second.prefill.summary.prompt_tokens_loaded == {"peer": num_known}
    assert other.num_tokens_run == len(turn) - num_known
    await_free(pair, other)


def test_a_holder_killed_while_sending_only_delays_the_answer(
    pair: Pair, other: EngineNode, local: LLM
) -> None:
    prompt = prompt_of(390, seed=204)
    pair.acquaint_prefill(prompt)
    pair.p.hold_before_post(1)
    handoff_id = pair.new_id()
    source = source_of(pair.p, 390)
    prefill = pair.prefill(handoff_id, prompt, greedy(NUM_TOKENS), node=other, source=source)
    decode = pair.decode(handoff_id, prompt, greedy(NUM_TOKENS), node=other)
    pair.p.await_held()

    pair.p.kill()

    assert decode.to_its_end().token_ids == expected(local, prompt)
    assert prefill.to_its_end().summary.prompt_tokens_loaded == {}
    assert other.num_tokens_run == 390
    pair.await_free_on(pair.d)
    await_load(other.address, all_free(card_at(other.address)))
    pair.heal()


def test_a_router_names_the_decode_node_that_wrote_the_answer_to_another_prefill_node(
    cluster_options: Callable[..., ClusterOptions], local: LLM
) -> None:
    # In turn, so that the second prefill node, which has nothing yet, computes the second turn.
    in_turn = ("--policy", "round_robin", "--local-prefill-below", "0")
    options = cluster_options(num_prefill=2, router_arguments=in_turn)
    prompt = prompt_of(100, seed=205)
    sampling = Generation(greedy(NUM_TOKENS))
    with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=60) as client:
        await_prefills_reported(cluster)  # the turns are those of all nodes that are ready
        first = client.generate(prompt, sampling)
        await_reported(cluster.address, cluster.decodes[0].address)
        turn = (*prompt, *first.token_ids, *prompt_of(40, seed=206))
        second = client.generate(turn, sampling)

    assert second.token_ids == expected(local, turn)
    assert first.finish is not None
    assert second.finish is not None
    assert second.finish.served.prefill_node != first.finish.served.prefill_node
    num_known = num_whole(100 + NUM_TOKENS - 1)
    assert second.finish.served.prompt_tokens_loaded == {"peer": num_known}
    assert second.finish.served.prompt_tokens_cached_on_prefill == num_known


def test_a_snapshot_of_a_recurrent_state_is_pulled_with_its_prefix(
    cluster_options: Callable[..., ClusterOptions], tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path, STATE_VARIANTS["qwen3-next"])
    in_turn = ("--policy", "round_robin", "--local-prefill-below", "0")
    options = cluster_options(num_prefill=2, router_arguments=in_turn)
    first, second = ((*prompt_of(128, seed=207), *prompt_of(9, seed=seed)) for seed in (208, 209))
    sampling = Generation(greedy(NUM_TOKENS))
    with (
        LocalCluster(replace(options, model=str(folder))) as cluster,
        Client(cluster.address, timeout_s=60) as client,
    ):
        await_prefills_reported(cluster)
        earlier = client.generate(first, sampling)
        await_prefills_reported(cluster)  # one of them has the snapshot
        answer = client.generate(second, sampling)

    assert earlier.finish is not None
    assert answer.finish is not None
    assert answer.finish.served.prefill_node != earlier.finish.served.prefill_node
    assert answer.finish.served.prompt_tokens_loaded == {"peer": 128}
    assert answer.token_ids == reference_greedy(folder, second, NUM_TOKENS)
