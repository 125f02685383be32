"""Each model family: tokens and logprobs equal those of transformers, however they are computed.

In float32 they are equal: in batches, in odd chunks, after preemptions, with cached prefixes,
through hand-offs over NIXL by layers and after the death of a decode engine. In bfloat16 they are
close.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.scheduler.config import SchedulerConfig
from tests.support.families import FAMILY_VARIANTS, RECURRENT
from tests.support.kernels import kernels_by_variant
from tests.support.local_handoffs import LocalHandoffs
from tests.support.models import (
    half_reference_logprobs,
    prompt_of,
    reference_choices,
    reference_logprobs,
)
from tests.support.runner_drivers import Drive, Driver, drives_of

BLOCK_SIZE = 16
CHUNK = 23  # no multiple of a block
NUM_TOKENS = 32  # longer than the windows, also after one token
PROMPT = prompt_of(70)  # four blocks and six tokens
TOLERANCE = 2e-4
# Median difference between two computations in bfloat16, in nats. A token with a near tie between
# experts can differ much more.
HALF_TOLERANCE = 0.1

LoadRunner = Callable[..., TorchRunner]
FolderOf = Callable[[str], Path]

each_family = pytest.mark.parametrize("name", FAMILY_VARIANTS)
# The others are driven without a scheduler in test_state_families.py.
each_scheduled_family = pytest.mark.parametrize("name", sorted(FAMILY_VARIANTS.keys() | RECURRENT))
# Windows, unlike layers, sinks with windows, latent attention, chunks, and recurrent states.
KINDS_OF_CACHES = ("gemma3", "gemma4", "gpt-oss", "deepseek-v3", "llama4", *RECURRENT)
each_kind_of_cache = pytest.mark.parametrize("name", KINDS_OF_CACHES)


def driver(runner: TorchRunner, chunk: int) -> Driver:
    blocks = runner.kv_memory.num_blocks
    return Driver(runner, num_blocks=blocks, block_size=BLOCK_SIZE, chunk=chunk)


@each_family
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(
    name: str, family_runner: LoadRunner, family_folder: FolderOf
) -> None:
    prompts = [PROMPT, prompt_of(1), prompt_of(33)]
    sampling = SamplingParams(temperature=1.3, top_k=50, logprobs=3)
    drawn = Drive(RequestId("drawn"), prompt_of(50), sampling=sampling, seed=5, num_tokens=24)

    *batched, _ = driver(family_runner(name), chunk=CHUNK).run(
        *drives_of(prompts, num_tokens=NUM_TOKENS), drawn
    )

    folder = family_folder(name)
    assert batched == [
        reference_choices(folder, prompt, answer, NUM_TOKENS)
        for prompt, answer in zip(prompts, batched, strict=True)
    ]
    assert len(set(batched[0])) > 4
    expected = reference_logprobs(folder, drawn.tokens)[len(drawn.prompt) - 1 :]
    for found, row in zip(drawn.logprobs, expected, strict=False):
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=TOLERANCE)
        assert [token for token, _ in found.top] == row.topk(3).indices.tolist()


@each_family
# The second one is always in the answer.
@pytest.mark.parametrize(("chunk", "preempted_at"), [(1, (1, 31)), (1 << 20, (1, 6))])
def test_a_preempted_request_keeps_its_tokens(
    name: str,
    chunk: int,
    preempted_at: tuple[int, ...],
    family_runner: LoadRunner,
    family_folder: FolderOf,
) -> None:
    drive = Drive(RequestId("r"), prompt_of(27), num_tokens=10)
    running = driver(family_runner(name), chunk)
    running.add(drive)

    for step in range(max(preempted_at) + 1):
        if step in preempted_at:
            running.preempt(drive.request_id)
        running.step()
    running.run()

    assert drive.outputs == reference_choices(family_folder(name), drive.prompt, drive.outputs, 10)


def test_a_long_prompt_uses_the_long_factors_of_longrope(
    family_runner: LoadRunner, family_folder: FolderOf
) -> None:
    prompt = prompt_of(300)  # longer than `original_max_position_embeddings`
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    drive = Drive(RequestId("r"), prompt, sampling=sampling, num_tokens=1)

    driver(family_runner("phi4-mini"), chunk=CHUNK).run(drive)

    expected = reference_logprobs(family_folder("phi4-mini"), prompt)
    for found, row in zip(drive.prompt_logprobs[1:], expected, strict=False):
        assert found is not None
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=TOLERANCE)


def answers(engine: EngineCore, *prompts: tuple[int, ...], num_tokens: int) -> list[list[int]]:
    """Return the greedy answers to prompts that run together."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    tokens: dict[str, list[int]] = {f"r{number}": [] for number in range(len(prompts))}
    for name, prompt in zip(tokens, prompts, strict=True):
        engine.scheduler.add(EngineRequest(RequestId(name), prompt, sampling, seed=0))
    while engine.scheduler.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    engine.scheduler.check()
    return list(tokens.values())


@each_scheduled_family
def test_prefix_hits_change_no_token(
    name: str, family_runner: LoadRunner, family_folder: FolderOf
) -> None:
    scheduling = SchedulerConfig(max_num_batched_tokens=CHUNK, max_num_seqs=4)
    runner = family_runner(name)
    engine = build_engine(runner, EngineOptions(scheduling))
    branched = (*PROMPT[:48], *prompt_of(9, seed=5))
    third = (*PROMPT[:48], *prompt_of(9, seed=6))
    answers(engine, PROMPT, num_tokens=1)

    [again], [other], [another] = (
        answers(engine, prompt, num_tokens=count)
        for prompt, count in ((PROMPT, 16), (branched, 8), (third, 8))
    )

    # A recurrent state has a snapshot at the prompt's last whole block, at multiples of this, and
    # where the second prompt leaves the first.
    snapshot_interval = 16 * max(1, runner.kv_memory.layout.num_state_blocks)
    num_shared = 48 // snapshot_interval * snapshot_interval
    assert engine.scheduler.stats().total_prefix_hit_tokens == 64 + num_shared + 48
    folder = family_folder(name)
    assert again == reference_choices(folder, PROMPT, again, 16)
    assert other == reference_choices(folder, branched, other, 8)
    assert another == reference_choices(folder, third, another, 8)


@each_kind_of_cache
def test_a_cache_too_small_for_all_preempts_and_changes_no_token(
    name: str, family_runner: LoadRunner, family_folder: FolderOf
) -> None:
    memory = family_runner(name).kv_memory
    # Room for about one and a half of four requests.
    num_blocks = 4 * len(memory.layout.groups) + 4 * memory.layout.num_state_blocks
    small = family_runner(name, kv_cache_bytes=num_blocks * memory.block_bytes)
    scheduling = SchedulerConfig(max_num_batched_tokens=CHUNK, max_num_seqs=4)
    engine = build_engine(small, EngineOptions(scheduling))
    prompts = [prompt_of(length) for length in (1, 17, 20, 30)]

    found = answers(engine, *prompts, num_tokens=20)

    assert found == [
        reference_choices(family_folder(name), prompt, tokens, 20)
        for prompt, tokens in zip(prompts, found, strict=True)
    ]
    assert engine.scheduler.stats().total_preemptions > 0


@pytest.mark.parametrize(
    ("name", "async_scheduling"),
    [(name, False) for name in sorted(FAMILY_VARIANTS.keys() | RECURRENT)]
    + [(name, True) for name in KINDS_OF_CACHES],
)
def test_hand_offs_and_the_death_of_a_decode_engine_change_no_token(
    name: str, family_runner: LoadRunner, family_folder: FolderOf, *, async_scheduling: bool
) -> None:
    decodes = [family_runner(name, copy=copy) for copy in ("decode-0", "decode-1")]
    prefill = family_runner(name)
    with LocalHandoffs(prefill, decodes, chunk=CHUNK, async_scheduling=async_scheduling) as engines:
        whole = engines.answer(PROMPT, 12)  # into another block
        pushes_layers = engines.prefill.sends_before_the_end()

        begun = engines.answer(PROMPT, 12, until=6)
        engines.kill_decode()
        rest = engines.answer(PROMPT, 12, prior=begun.token_ids)

    expected = reference_choices(family_folder(name), PROMPT, whole.token_ids, 12)
    assert whole.token_ids == expected
    assert begun.token_ids + rest.token_ids == expected
    assert pushes_layers
    assert whole.num_received == len(PROMPT)
    assert rest.num_received == len(PROMPT) + len(begun.token_ids)


@each_family
@pytest.mark.parametrize(
    "kernels",
    [
        "torch",
        pytest.param(
            "native", marks=pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler")
        ),
    ],
)
def test_half_precision_is_close_to_that_of_transformers(
    name: str, kernels: str, family_runner: LoadRunner, family_folder: FolderOf
) -> None:
    runner = family_runner(name, dtype="bfloat16", kernels=kernels)
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    drive = Drive(RequestId("r"), PROMPT, sampling=sampling, num_tokens=12)
    driver(runner, chunk=CHUNK).run(drive)
    # Its tokens again, as a prompt in other chunks.
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    again = Drive(RequestId("again"), drive.tokens, sampling=sampling, num_tokens=1)
    driver(runner, chunk=9).run(again)

    found = torch.tensor([each.logprob for each in again.prompt_logprobs if each is not None])
    expected = half_reference_logprobs(family_folder(name), drive.tokens)
    assert (found - expected).abs().median() < HALF_TOLERANCE
    # As exact as transformers in the same dtype.
    exact = reference_logprobs(family_folder(name), drive.tokens)[:-1]
    exact = exact.gather(1, torch.tensor(drive.tokens[1:])[:, None])[:, 0]
    assert (found - exact).abs().mean() < 1.5 * (expected - exact).abs().mean() + 0.01
    if kernels == "native":
        assert found[-12:].tolist() == [each.logprob for each in drive.logprobs]
