"""Layer-wise KV push between two nodes: the same tokens, and no byte is sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_pair import KINDS, Answered, Pair, PairOptions, greedy
from tests.support.models import prompt_of, reference_choices
from tests.support.transport_endpoints import skip_if_missing

BLOCK_SIZE, CHUNK, NUM_TOKENS = 16, 24, 8

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=["nixl", pytest.param("ucxx", marks=skip_if_missing("ucxx"))],
)
def pair(model_folder: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    kind = f"{request.param} by layer"
    KINDS.setdefault(kind, {"kv_transport": request.param})
    with Pair(PairOptions(model_folder, kind, chunk_tokens=CHUNK)) as running:
        yield running


@pytest.mark.parametrize("length", [1, BLOCK_SIZE + 1, CHUNK, 4 * BLOCK_SIZE, 400])
def test_tokens_equal_those_of_transformers_and_no_byte_is_sent_twice(
    pair: Pair, model_folder: Path, length: int
) -> None:
    prompt = prompt_of(length, seed=700)

    answer = pair.answer(prompt, greedy(NUM_TOKENS))

    num_blocks = -(-length // BLOCK_SIZE)
    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, NUM_TOKENS)
    assert answer.decode.summary.prompt_tokens_computed == 0
    assert answer.decode.summary.kv_bytes == num_blocks * pair.d_card.block_bytes
    pair.await_all_free()


@pytest.mark.parametrize("known_to", ["decode", "prefill"])
def test_cached_prefixes_at_either_node_do_not_change_tokens(
    pair: Pair, model_folder: Path, known_to: str
) -> None:
    prompt = prompt_of(200, seed=701 + len(known_to))
    acquaint = pair.acquaint_decode if known_to == "decode" else pair.acquaint_prefill
    acquaint(prompt[:100])

    answer = pair.answer(prompt, greedy(NUM_TOKENS))

    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, NUM_TOKENS)
    num_known = 6 if known_to == "decode" else 0
    assert answer.decode.summary.kv_blocks == 13 - num_known
    pair.await_all_free()


def test_concurrent_requests_get_their_own_tokens(pair: Pair, model_folder: Path) -> None:
    prompts = [prompt_of(40 + 9 * number, seed=720 + number) for number in range(12)]

    requested = [pair.start(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    answers = [Answered(p.to_its_end(), d.to_its_end()) for p, d in requested]

    for prompt, answer in zip(prompts, answers, strict=True):
        choices = reference_choices(model_folder, prompt, answer.token_ids, NUM_TOKENS)
        assert answer.token_ids == choices
    assert all(answer.was_handed_over for answer in answers)
    pair.await_all_free()
