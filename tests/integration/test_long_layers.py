"""Layers that take longer than every timeout of a hand-off: no hand-off or link is given up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_pair import Answered, Pair, PairOptions, greedy
from tests.support.models import prompt_of, reference_choices

LENGTH, CHUNK, NUM_TOKENS = 200, 24, 8
LIMIT_S = 3.0  # lease and silence alike
LAYER_S = 2.5 * LIMIT_S

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("nixl", False), id="nixl"),
        pytest.param(("ucxx", False), id="ucxx"),
        pytest.param(("nixl", True), id="asynchronous"),
    ],
)
def pair(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Pair]:
    kind, async_scheduling = request.param
    options = PairOptions(
        model_folder,
        kind,
        chunk_tokens=CHUNK,
        lease_s=LIMIT_S,
        silence_s=LIMIT_S,
        fence_age_s=60.0,
        async_scheduling=async_scheduling,
    )
    with Pair(options) as running:
        yield running


def test_nodes_can_connect_during_a_prefill_layer_longer_than_the_silence_limit(
    pair: Pair, model_folder: Path
) -> None:
    prompt = prompt_of(LENGTH, seed=899)
    pair.p.slow_down_pass(1, LAYER_S)

    answer = pair.answer(prompt, greedy(NUM_TOKENS))

    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, NUM_TOKENS)
    assert answer.was_handed_over
    pair.await_all_free()


def test_a_prefill_layer_can_be_longer_than_the_silence_limit(
    pair: Pair, model_folder: Path
) -> None:
    prompt = prompt_of(LENGTH, seed=900)
    pair.p.slow_down_pass(3, LAYER_S)

    answer = pair.answer(prompt, greedy(NUM_TOKENS))

    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, NUM_TOKENS)
    assert answer.was_handed_over
    pair.await_all_free()


def test_a_decode_layer_can_be_longer_than_its_leases(pair: Pair, model_folder: Path) -> None:
    prompt, handoff_id = prompt_of(LENGTH, seed=901), pair.new_id()
    decode = pair.decode(handoff_id, prompt, greedy(NUM_TOKENS))
    pair.await_granted()
    pair.p.hold_before_pass(3)
    prefill = pair.prefill(handoff_id, prompt, greedy(NUM_TOKENS))
    pair.p.await_held()

    pair.d.slow_down_pass(1, LAYER_S)
    beside = pair.decode(pair.new_id(), (5, 6, 7), greedy(2), is_local=True)
    beside.to_its_end()  # decode is back
    pair.p.let_go()

    answer = Answered(prefill.to_its_end(), decode.to_its_end())
    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, NUM_TOKENS)
    assert answer.was_handed_over
    pair.await_all_free()
