"""Prefill and decode node without a router: tokens, transferred blocks and admission."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.output import FinishReason
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tests.support.engine_pair import Answered, Pair, PairOptions, greedy
from tests.support.models import EOS_TOKEN_ID, prompt_of, reference_choices, reference_greedy

BLOCK_SIZE = 16
CHUNK = 24
NUM_TOKENS = 12
NUM_PREFILL_BLOCKS = 64

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["nixl", "ucxx"])
def pair(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Pair]:
    room = PairOptions(
        model_folder, request.param, chunk_tokens=CHUNK, prefill_bytes=NUM_PREFILL_BLOCKS * 8192
    )
    with Pair(room) as running:
        yield running


def num_blocks_of(prompt: tuple[int, ...]) -> int:
    return -(-len(prompt) // BLOCK_SIZE)


@pytest.mark.parametrize(
    "length",
    [
        1,
        BLOCK_SIZE - 1,
        BLOCK_SIZE,
        BLOCK_SIZE + 1,
        CHUNK,
        4 * BLOCK_SIZE - 1,
        4 * BLOCK_SIZE,
        4 * BLOCK_SIZE + 1,
        400,  # 17 chunks
    ],
)
def test_handed_over_tokens_equal_those_of_one_engine_and_of_transformers(
    pair: Pair, local: LLM, model_folder: Path, length: int
) -> None:
    prompt = prompt_of(length, seed=100)
    num_tokens_before = pair.p.num_tokens_run

    answer = pair.answer(prompt, greedy(NUM_TOKENS))

    assert answer.token_ids == local.generate(prompt, greedy(NUM_TOKENS))[0].token_ids
    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, NUM_TOKENS)
    assert pair.p.num_tokens_run - num_tokens_before == length
    assert_moved(pair, answer, num_blocks_of(prompt))
    pair.await_all_free()


# How many of the prompt's tokens either node has seen before. The prompt is 5 blocks and 7 tokens.
@pytest.mark.parametrize("known_to_prefill", [0, 40, 87])
@pytest.mark.parametrize("known_to_decode", [0, 40, 87])
def test_only_blocks_missing_at_the_decode_node_are_transferred(
    pair: Pair, model_folder: Path, known_to_decode: int, known_to_prefill: int
) -> None:
    prompt = prompt_of(87, seed=200 + 100 * known_to_decode + known_to_prefill)
    pair.acquaint_decode(prompt[:known_to_decode])
    pair.acquaint_prefill(prompt[:known_to_prefill])
    before = pair.p.num_tokens_run, pair.d.num_tokens_run

    answer = pair.answer(prompt, greedy(NUM_TOKENS))

    hits_on_decode, hits_on_prefill = known_to_decode // 16, known_to_prefill // 16
    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, NUM_TOKENS)
    assert_moved(pair, answer, 6 - hits_on_decode)
    assert answer.decode.summary.prompt_tokens_cached == hits_on_decode * BLOCK_SIZE
    assert pair.p.num_tokens_run - before[0] == 87 - hits_on_prefill * BLOCK_SIZE
    # The first token came with the KV; each of the others but the last was run once.
    assert pair.d.num_tokens_run - before[1] == NUM_TOKENS - 1
    pair.await_all_free()


def test_a_prompt_of_full_blocks_cached_at_the_decode_node_transfers_nothing(
    pair: Pair, model_folder: Path
) -> None:
    prompt = prompt_of(4 * BLOCK_SIZE, seed=300)
    first = pair.answer(prompt, greedy(NUM_TOKENS))

    again = pair.answer(prompt, greedy(NUM_TOKENS))

    assert again.token_ids == first.token_ids
    assert again.token_ids == reference_choices(model_folder, prompt, again.token_ids, NUM_TOKENS)
    assert_moved(pair, first, 4)
    assert again.was_handed_over
    assert (again.decode.summary.kv_blocks, again.decode.summary.kv_bytes) == (0, 0)
    pair.await_all_free()


@pytest.mark.parametrize("length", [10, 90])
def test_seeded_sampling_draws_the_tokens_of_one_engine(
    pair: Pair, local: LLM, length: int
) -> None:
    prompt = prompt_of(length, seed=400)
    sampling = SamplingParams(max_tokens=32, temperature=0.9, top_p=0.95, seed=13, ignore_eos=True)

    answer = pair.answer(prompt, sampling)

    assert answer.token_ids == local.generate(prompt, sampling)[0].token_ids
    assert len(set(answer.token_ids)) > 8
    assert_moved(pair, answer, num_blocks_of(prompt))


@pytest.mark.parametrize("way", ["max_tokens", "stop_token", "eos"])
def test_a_first_token_that_ends_the_request_ends_the_hand_off(
    pair: Pair, model_folder: Path, way: str
) -> None:
    prompt = prompt_of(50, seed=500)
    [usual] = reference_greedy(model_folder, prompt, 1)
    sampling, expected, reason = {
        "max_tokens": (greedy(1), usual, FinishReason.LENGTH),
        "stop_token": (greedy(stop_token_ids=(usual,)), usual, FinishReason.STOP),
        "eos": (
            greedy(ignore_eos=False, allowed_token_ids=(EOS_TOKEN_ID,)),
            EOS_TOKEN_ID,
            FinishReason.STOP,
        ),
    }[way]
    before = pair.d.num_tokens_run

    answer = pair.answer(prompt, sampling)

    assert (answer.token_ids, answer.decode.reason) == ([expected], reason)
    assert pair.d.num_tokens_run == before
    pair.await_all_free()


def test_a_granted_prompt_gets_the_blocks_of_a_hand_off_that_no_decode_node_has_granted(
    pair: Pair, model_folder: Path
) -> None:
    num_tokens = NUM_PREFILL_BLOCKS // 2 * BLOCK_SIZE - NUM_TOKENS
    held = [prompt_of(num_tokens, seed=700 + number) for number in range(2)]
    ids = [pair.new_id() for _ in held]
    sampling = greedy(NUM_TOKENS)
    calls = [pair.prefill(*each, sampling) for each in zip(ids, held, strict=True)]
    for call in calls:
        call.until_tokens(1)  # the cache is full
    prompt = prompt_of(num_tokens, seed=702)

    answer = pair.answer(prompt, sampling)

    assert answer.was_handed_over
    assert answer.token_ids == reference_greedy(model_folder, prompt, NUM_TOKENS)
    late = [pair.decode(*each, sampling).to_its_end() for each in zip(ids, held, strict=True)]
    for call, its_prompt in zip(late, held, strict=True):
        assert call.token_ids == reference_greedy(model_folder, its_prompt, NUM_TOKENS)
    assert sorted(call.summary.prompt_tokens_computed for call in late) == [0, num_tokens]
    for call in calls:
        call.to_its_end()
    pair.await_all_free()


@pytest.mark.parametrize("kind", ["nixl", "ucxx"])
def test_64_concurrent_hand_offs_finish_with_a_decode_cache_for_ten(
    model_folder: Path, kind: str
) -> None:
    # 40 tokens and 7 more to keep: 3 blocks each.
    prompts = [prompt_of(40, seed=600 + number) for number in range(64)]
    room = PairOptions(model_folder, kind, decode_bytes=30 * 8192, chunk_tokens=64)
    with Pair(room) as pair:
        assert (pair.d_card.num_blocks, pair.d_card.block_bytes) == (30, 8192)

        requested = [pair.start(prompt, greedy()) for prompt in prompts]
        answers = [Answered(p.to_its_end(), d.to_its_end()) for p, d in requested]

        for prompt, answer in zip(prompts, answers, strict=True):
            choices = reference_choices(model_folder, prompt, answer.token_ids, 8)
            assert answer.token_ids == choices
        for answer in answers:
            assert_moved(pair, answer, 3)
        pair.await_all_free()


def assert_moved(pair: Pair, answer: Answered, num_blocks: int) -> None:
    summary = answer.decode.summary
    assert answer.prefill.was_sent
    assert summary.prompt_tokens_computed == 0
    assert summary.kv_blocks == num_blocks
    assert summary.kv_bytes == num_blocks * pair.d_card.block_bytes
    assert summary.kv_transport == pair.d_card.kv_transport
