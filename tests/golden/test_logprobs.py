"""Logprobs equal those of transformers, before any sampling setting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.core.ids import RequestId
from baton.core.sampling import SamplingParams
from baton.engine.runner.model_runner import TorchRunner
from tests.support.models import VARIANTS, prompt_of, reference_logprobs
from tests.support.runner_drivers import Drive, Driver

BLOCK_SIZE = 16
FLOAT32 = [name for name, variant in VARIANTS.items() if variant.dtype == "float32"]
HALVES = [name for name, variant in VARIANTS.items() if variant.dtype != "float32"]
# A dynamic rope is another function for each length of the whole; see the greedy tests.
ONE_PASS = [name for name in FLOAT32 if name != "llama-rope-dynamic"]
TOLERANCE = 1e-4
# Tolerance between two computations of a half-precision model, in nats.
HALF_TOLERANCE = {"bfloat16": 0.3, "float16": 0.04}

RunnerOf = Callable[[str], TorchRunner]
FolderOf = Callable[[str], Path]


def answer(
    runner: TorchRunner,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    *,
    num_tokens: int = 24,
    chunk: int = 24,
) -> Drive:
    drive = Drive(RequestId("r"), prompt, sampling=sampling, seed=5, num_tokens=num_tokens)
    blocks = runner.kv_memory.num_blocks
    Driver(runner, num_blocks=blocks, block_size=BLOCK_SIZE, chunk=chunk).run(drive)
    return drive


@pytest.mark.parametrize("name", ONE_PASS)
def test_logprobs_and_ranks_of_the_answer_equal_those_of_transformers(
    name: str, runner_of: RunnerOf, model_folder: FolderOf
) -> None:
    prompt = prompt_of(33)
    sampling = SamplingParams(temperature=1.3, top_k=50, repetition_penalty=1.2, logprobs=5)

    drive = answer(runner_of(name), prompt, sampling)

    expected = reference_logprobs(model_folder(name), drive.tokens)[len(prompt) - 1 :]
    assert [each.token_id for each in drive.logprobs] == drive.outputs
    assert {each.rank for each in drive.logprobs} != {1}  # drawn, not greedy
    for found, row in zip(drive.logprobs, expected, strict=False):
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=TOLERANCE)
        assert found.rank == 1 + int((row > row[found.token_id]).sum())
        assert [token for token, _ in found.top] == row.topk(5).indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(
            row.topk(5).values.tolist(), abs=TOLERANCE
        )


@pytest.mark.parametrize("name", ONE_PASS)
@pytest.mark.parametrize("chunk", [1, 24, 1 << 20])
def test_prompt_logprobs_equal_those_of_transformers_however_chunked(
    name: str, chunk: int, runner_of: RunnerOf, model_folder: FolderOf
) -> None:
    prompt = prompt_of(50)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2)

    drive = answer(runner_of(name), prompt, sampling, num_tokens=3, chunk=chunk)

    expected = reference_logprobs(model_folder(name), prompt)
    assert len(drive.prompt_logprobs) == len(prompt)
    assert drive.prompt_logprobs[0] is None
    for place, found in enumerate(drive.prompt_logprobs[1:], start=1):
        assert found is not None
        row = expected[place - 1]
        assert found.token_id == prompt[place]
        assert found.logprob == pytest.approx(float(row[prompt[place]]), abs=TOLERANCE)
        assert found.rank == 1 + int((row > row[prompt[place]]).sum())
        assert [token for token, _ in found.top] == row.topk(2).indices.tolist()


def test_a_resumed_request_does_not_repeat_its_prompt_logprobs(runner_of: RunnerOf) -> None:
    runner = runner_of("llama")
    drive = Drive(
        RequestId("r"),
        prompt_of(40),
        sampling=SamplingParams(temperature=0.0, prompt_logprobs=0),
        num_tokens=12,
    )
    blocks = runner.kv_memory.num_blocks
    running = Driver(runner, num_blocks=blocks, block_size=BLOCK_SIZE, chunk=16)
    running.add(drive)

    for step in range(10):
        if step == 6:  # three for the prompt, then three tokens
            running.preempt(drive.request_id)
        running.step()
    running.run()

    assert len(drive.prompt_logprobs) == len(drive.prompt)


def test_a_restarted_prompt_repeats_its_logprobs_from_the_start(runner_of: RunnerOf) -> None:
    runner = runner_of("llama")
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    drive = Drive(RequestId("r"), prompt_of(40), sampling=sampling, num_tokens=1)
    blocks = runner.kv_memory.num_blocks
    running = Driver(runner, num_blocks=blocks, block_size=BLOCK_SIZE, chunk=16)
    running.add(drive)

    running.step()
    running.preempt(drive.request_id)
    running.run()

    reported, told_again = drive.prompt_logprobs[:16], drive.prompt_logprobs[16:]
    assert len(told_again) == len(drive.prompt)
    assert told_again[0] is None
    assert told_again[:16] == reported


@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_close_and_picks_the_same_tokens_at_clear_margins(
    name: str, runner_of: RunnerOf, model_folder: FolderOf
) -> None:
    prompt, tolerance = prompt_of(40), HALF_TOLERANCE[VARIANTS[name].dtype]
    sampling = SamplingParams(temperature=0.0, logprobs=0)

    drive = answer(runner_of(name), prompt, sampling, num_tokens=64)

    # On the runner's own tokens, so that one near tie does not end the comparison.
    expected = reference_logprobs(model_folder(name), drive.tokens)[len(prompt) - 1 : -1]
    chosen = expected.gather(1, torch.tensor(drive.outputs)[:, None])[:, 0]
    ours = torch.tensor([each.logprob for each in drive.logprobs])
    assert (ours - chosen).abs().max() < tolerance
    assert (expected.max(dim=1).values - chosen).max() < tolerance
    assert (expected.argmax(dim=1) == torch.tensor(drive.outputs)).float().mean() > 0.9
    assert runner_of(name).info.dtype == VARIANTS[name].dtype
