"""Greedy tokens of the runner equal those of transformers, for any chunking and batching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.core.ids import RequestId
from baton.engine.runner.model_runner import TorchRunner
from tests.support.models import VARIANTS, prompt_of, reference_choices
from tests.support.runner_drivers import Drive, Driver, drives_of

BLOCK_SIZE = 16
NUM_TOKENS = 32
FLOAT32 = [name for name, variant in VARIANTS.items() if variant.dtype == "float32"]
# One token, a block less one, a block, one more, and several chunks of 24.
PROMPT_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 100)

RunnerOf = Callable[[str], TorchRunner]
FolderOf = Callable[[str], Path]


def driver(runner: TorchRunner, *, chunk: int = 24, shuffle_seed: int = 0) -> Driver:
    return Driver(
        runner,
        num_blocks=runner.kv_memory.num_blocks,
        block_size=BLOCK_SIZE,
        chunk=chunk,
        shuffle_seed=shuffle_seed,
    )


def alone(runner: TorchRunner, prompt: tuple[int, ...], *, chunk: int = 24) -> Drive:
    drive = Drive(RequestId("alone"), prompt, num_tokens=NUM_TOKENS)
    driver(runner, chunk=chunk).run(drive)
    return drive


def assert_greedy(folder: Path, *drives: Drive) -> None:
    for drive in drives:
        choices = reference_choices(folder, drive.prompt, drive.outputs, drive.num_tokens)
        assert drive.outputs == choices


@pytest.mark.parametrize("name", FLOAT32)
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_tokens_equal_those_of_transformers(
    name: str, length: int, runner_of: RunnerOf, model_folder: FolderOf
) -> None:
    drive = alone(runner_of(name), prompt_of(length))

    assert_greedy(model_folder(name), drive)
    # A model that repeats itself would agree with nearly anything.
    assert len(set(drive.outputs)) > NUM_TOKENS // 4


@pytest.mark.parametrize("name", FLOAT32)
def test_tokens_in_a_mixed_batch_equal_those_alone(
    name: str, runner_of: RunnerOf, model_folder: FolderOf
) -> None:
    # Long ones first: their chunks stand between the decodes of those that came later.
    prompts = [prompt_of(length) for length in (100, 70, *PROMPT_LENGTHS, 31)]

    drives = drives_of(prompts, num_tokens=NUM_TOKENS)

    driver(runner_of(name)).run(*drives)

    assert_greedy(model_folder(name), *drives)


@pytest.mark.parametrize("name", FLOAT32)
@pytest.mark.parametrize("chunk", [1, 16, 1 << 20])
def test_tokens_do_not_depend_on_how_the_prompt_is_chunked(
    name: str, chunk: int, runner_of: RunnerOf, model_folder: FolderOf
) -> None:
    drive = alone(runner_of(name), prompt_of(70), chunk=chunk)

    assert_greedy(model_folder(name), drive)


@pytest.mark.parametrize("name", FLOAT32)
def test_a_preempted_request_continues_with_the_same_tokens(
    name: str, runner_of: RunnerOf, model_folder: FolderOf
) -> None:
    hit, other = (
        Drive(RequestId("hit"), prompt_of(37), num_tokens=NUM_TOKENS),
        Drive(RequestId("other"), prompt_of(50), num_tokens=NUM_TOKENS),
    )
    running = driver(runner_of(name))
    running.add(hit)
    running.add(other)

    for step in range(40):
        if step in (1, 13, 29):  # in its prompt, early and late in its answer
            running.preempt(hit.request_id)
        running.step()
    running.run()

    assert_greedy(model_folder(name), hit, other)


@pytest.mark.parametrize("name", FLOAT32)
def test_starting_and_ending_requests_changes_no_other_tokens(
    name: str, runner_of: RunnerOf, model_folder: FolderOf
) -> None:
    drives = [
        Drive(RequestId(f"r{i}"), prompt_of(5 + 13 * i), num_tokens=20 + 9 * (i % 3))
        for i in range(5)
    ]
    running = driver(runner_of(name), shuffle_seed=3)

    for drive in drives:
        running.add(drive)
        for _ in range(7):
            running.step()
    running.run()

    assert_greedy(model_folder(name), *drives)
