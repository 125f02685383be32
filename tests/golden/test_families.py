"""Each model family: tokens and logprobs equal those of transformers, however they are computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.request import RequestId
from engine.runner.model_runner import TorchRunner
from engine.sampling import SamplingParams
from tests.support.families import FAMILY_VARIANTS
from tests.support.models import prompt_of, reference_greedy, reference_logprobs
from tests.support.runner_drivers import Drive, Driver, drives_of

BLOCK_SIZE = 16
NUM_TOKENS = 64
TOLERANCE = 2e-4

each_family = pytest.mark.parametrize("name", FAMILY_VARIANTS)


def driver(runner: TorchRunner, chunk: int) -> Driver:
    blocks = runner.kv_memory.num_blocks
    return Driver(runner, num_blocks=blocks, block_size=BLOCK_SIZE, chunk=chunk)


@each_family
def test_greedy_tokens_equal_those_of_transformers(
    name: str, family_runner: Callable[[str], TorchRunner], family_folder: Callable[[str], Path]
) -> None:
    prompts = [prompt_of(length) for length in (70, 1, 33)]

    batched = driver(family_runner(name), chunk=23).run(*drives_of(prompts, num_tokens=NUM_TOKENS))

    folder = family_folder(name)
    assert batched == [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
    assert len(set(batched[0])) > NUM_TOKENS // 16


@each_family
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_a_preempted_request_keeps_its_tokens(
    name: str, chunk: int, family_runner: Callable[[str], TorchRunner]
) -> None:
    runner = family_runner(name)
    alone, preempted = (
        Drive(RequestId(each), prompt_of(70), num_tokens=NUM_TOKENS)
        for each in ("alone", "preempted")
    )
    driver(runner, chunk=23).run(alone)

    running = driver(runner, chunk)
    running.add(preempted)
    for step in range(80):
        if step in (1, 75) and not preempted.is_done:
            running.preempt(preempted.request_id)
        running.step()
    running.run()

    assert preempted.outputs == alone.outputs


@each_family
def test_logprobs_equal_those_of_transformers(
    name: str, family_runner: Callable[[str], TorchRunner], family_folder: Callable[[str], Path]
) -> None:
    sampling = SamplingParams(temperature=1.3, top_k=50, logprobs=3)
    drive = Drive(RequestId("r"), prompt_of(50), sampling=sampling, seed=5, num_tokens=24)

    driver(family_runner(name), chunk=24).run(drive)

    expected = reference_logprobs(family_folder(name), drive.tokens)[len(drive.prompt) - 1 :]
    for found, row in zip(drive.logprobs, expected, strict=False):
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=TOLERANCE)
        assert [token for token, _ in found.top] == row.topk(3).indices.tolist()
