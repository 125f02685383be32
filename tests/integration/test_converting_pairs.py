"""Prefill and decode nodes whose KV blocks differ in size or dtype: converted when they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.ids import BlockId, RequestId
from baton.engine.runner.attention.kv_blocks import write_converted
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.llm import LLM
from tests.support.engine_pair import Pair, PairOptions, greedy
from tests.support.models import prompt_of
from tests.support.runner_drivers import Drive, Driver
from tests.support.scaled_kv import grown_folder

NUM_TOKENS = 12
STAGING = 1 << 18  # for about 500 tokens

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[("nixl", 16, 32), ("ucxx", 16, 32), ("nixl", 32, 16)],
    ids=lambda it: "-".join(map(str, it)),
)
def pair(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Pair]:
    kind, *sizes = request.param
    options = PairOptions(
        model_folder, kind, block_sizes=(sizes[0], sizes[1]), kv_staging_bytes=STAGING
    )
    with Pair(options) as running:
        yield running


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48, 90, 400])
def test_tokens_with_different_block_sizes_equal_those_of_one_engine(
    pair: Pair, local: LLM, length: int
) -> None:
    prompt = prompt_of(length, seed=300)

    answer = pair.answer(prompt, greedy(NUM_TOKENS))

    assert answer.was_handed_over
    assert answer.token_ids == local.generate(prompt, greedy(NUM_TOKENS))[0].token_ids
    p_size, d_size = (card.fingerprint.layout.block_size for card in (pair.p_card, pair.d_card))
    summary = answer.decode.summary
    assert summary.kv_conversion == f"block_size {p_size} to {d_size}"
    assert summary.kv_blocks == -(-length // p_size)
    assert summary.kv_bytes == summary.kv_blocks * pair.p_card.block_bytes
    pair.await_all_free()


@pytest.mark.parametrize("known", [16, 33, 48, 80, 87])
def test_a_prefix_that_ends_within_a_block_of_the_sender_is_kept(
    pair: Pair, local: LLM, known: int
) -> None:
    prompt = prompt_of(87, seed=400 + known)
    pair.acquaint_decode(prompt[:known])

    answer = pair.answer(prompt, greedy(NUM_TOKENS))

    p_size, d_size = (card.fingerprint.layout.block_size for card in (pair.p_card, pair.d_card))
    num_cached = known // d_size * d_size
    assert answer.token_ids == local.generate(prompt, greedy(NUM_TOKENS))[0].token_ids
    assert answer.decode.summary.prompt_tokens_cached == num_cached
    assert answer.decode.summary.kv_blocks == -(-87 // p_size) - num_cached // p_size


def test_hand_offs_wait_for_staging_blocks(pair: Pair, local: LLM) -> None:
    prompts = [prompt_of(300 + number, seed=500 + number) for number in range(12)]

    calls = [pair.start(prompt, greedy(NUM_TOKENS)) for prompt in prompts]

    for prompt, (prefill, decode) in zip(prompts, calls, strict=True):
        prefill.to_its_end()
        found = decode.to_its_end().token_ids
        assert found == local.generate(prompt, greedy(NUM_TOKENS))[0].token_ids
        assert decode.summary.prompt_tokens_computed == 0
    pair.await_all_free()


@pytest.fixture(scope="module")
def scaled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with scales of FP8 keys and values, which others ignore."""
    growth = torch.tensor([64.0, 96.0])
    scales = {"k_scale": growth, "v_scale": 2 * growth}
    return grown_folder(tmp_path_factory.mktemp("scaled"), growth, scales)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "sizes"),
    [("int8", (16, 16)), ("int8", (16, 32)), ("int8", (32, 16)), ("fp8", (16, 32))],
)
def test_a_bfloat16_prefill_node_serves_a_decode_node_with_kv_of_bytes(
    scaled_folder: Path, kv_cache_dtype: str, sizes: tuple[int, int]
) -> None:
    prompts = [prompt_of(length, seed=600 + length) for length in (1, 16, 47, 200)]
    options = PairOptions(
        scaled_folder,
        block_sizes=sizes,
        kv_cache_dtypes=("auto", kv_cache_dtype),
        kv_staging_bytes=STAGING,
        dtype="bfloat16",
    )

    with Pair(options) as pair:
        answers = [pair.answer(prompt, greedy(NUM_TOKENS)) for prompt in prompts]

    assert [each.token_ids for each in answers] == [
        converted_tokens(scaled_folder, kv_cache_dtype, sizes, prompt) for prompt in prompts
    ]
    expected = f"dtype bfloat16 to {kv_cache_dtype}/bfloat16"
    if sizes[0] != sizes[1]:
        expected += f", block_size {sizes[0]} to {sizes[1]}"
    assert {each.decode.summary.kv_conversion for each in answers} == {expected}


def converted_tokens(
    model: Path, kv_cache_dtype: str, sizes: tuple[int, int], prompt: tuple[int, ...]
) -> list[int]:
    """Return the tokens if KV is converted between two runners in this process."""
    drives = [Drive(RequestId("r"), prompt, num_tokens=number) for number in (2, NUM_TOKENS)]
    first, rest = drives
    configs = [
        RunnerConfig(
            str(model), dtype="bfloat16", kv_cache_bytes=1 << 20, block_size=size, kv_cache_dtype=kv
        )
        for size, kv in zip(sizes, ("auto", kv_cache_dtype), strict=True)
    ]
    with load_runner(configs[0]) as sender, load_runner(configs[1]) as receiver:
        computing = Driver(sender, num_blocks=40, block_size=sizes[0])
        computing.add(first)
        computing.step()
        num_blocks = -(-len(prompt) // sizes[1])
        rest.block_tables = [[BlockId(20 + number) for number in range(num_blocks)]]
        rest.outputs, rest.num_computed = list(first.outputs), len(prompt)
        sent, targets = sender.blocks.kv[first.block_tables[0]], torch.tensor(rest.block_tables[0])
        scales = None
        if kv_cache_dtype == "fp8":  # [layers, tensors, kv_heads, 1]
            growth = torch.tensor([64.0, 96.0])
            scales = torch.stack((growth, 2 * growth)).expand(2, 2, 2)[..., None]
        write_converted(sent, receiver.blocks.kv, targets, 0, scales)
        Driver(receiver, num_blocks=20, block_size=sizes[1]).run(rest)
    return rest.outputs


@pytest.mark.parametrize(("kv_cache_dtype", "scale_bytes"), [("int8", 2), ("fp8", 0)])
def test_nodes_with_kv_of_bytes_transfer_about_half_of_the_bytes(
    scaled_folder: Path, kv_cache_dtype: str, scale_bytes: int
) -> None:
    prompt, summaries, tokens = prompt_of(200, seed=700), [], []
    for name in ("auto", kv_cache_dtype):
        options = PairOptions(scaled_folder, kv_cache_dtypes=(name, name), dtype="bfloat16")
        with Pair(options) as pair:
            answer = pair.answer(prompt, greedy(NUM_TOKENS))
        assert answer.was_handed_over
        summaries.append(answer.decode.summary)
        tokens.append(answer.token_ids)

    with LLM(
        str(scaled_folder), dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, kv_cache_memory="4MiB"
    ) as llm:
        assert tokens[1] == llm.generate(prompt, greedy(NUM_TOKENS))[0].token_ids
    assert [each.kv_conversion for each in summaries] == ["", ""]
    head_dim = 16
    assert summaries[1].kv_bytes * 2 * head_dim == summaries[0].kv_bytes * (head_dim + scale_bytes)


@pytest.mark.parametrize(
    "options",
    [
        {"block_sizes": (16, 32)},  # without a staging area
        {"kv_cache_dtypes": ("int8", "auto"), "kv_staging_bytes": STAGING},
    ],
    ids=["block_size", "dtype"],
)
def test_inconvertible_kv_is_refused_and_computed_by_the_decode_node(
    model_folder: Path, local: LLM, options: dict[str, Any]
) -> None:
    prompt = prompt_of(60, seed=800)
    with Pair(PairOptions(model_folder, **options)) as pair:
        prefill, decode = pair.start(prompt, greedy(NUM_TOKENS))

        assert (
            decode.to_its_end().token_ids == local.generate(prompt, greedy(NUM_TOKENS))[0].token_ids
        )
        assert decode.summary.prompt_tokens_computed == len(prompt)
        prefill.disconnect()
