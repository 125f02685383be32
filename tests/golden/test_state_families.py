"""Families with recurrent layers: tokens and logprobs equal those of transformers.

The runner is driven without a scheduler: in batches, odd chunks, after preemptions and from
snapshots of the state that were taken inside of a pass.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.ids import RequestId
from baton.core.sampling import SamplingParams
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model_runner import TorchRunner
from tests.support.families import FAMILY_VARIANTS, RECURRENT, STATE_VARIANTS
from tests.support.kernels import kernels_by_variant
from tests.support.models import (
    half_reference_logprobs,
    prompt_of,
    reference_choices,
    reference_logprobs,
)
from tests.support.runner_drivers import Drive, Driver, drives_of

BLOCK_SIZE = 16
CHUNK = 23  # no multiple of a block
NUM_TOKENS = 32  # the third prompt and its answer are longer than a chunk of the delta rule
PROMPT = prompt_of(70)  # more than a chunk of the delta rule
# Against float64, transformers is off by up to 1e-4 in these models.
TOLERANCE, MEDIAN_TOLERANCE = 1e-3, 5e-5
HALF_TOLERANCE = 0.1  # as in test_families.py

LoadRunner = Callable[..., TorchRunner]
FolderOf = Callable[[str], Path]

# The others are tested in test_families.py.
each_other_family = pytest.mark.parametrize("name", sorted(STATE_VARIANTS.keys() - FAMILY_VARIANTS))
# A model with images has the same decoder.
each_other_decoder = pytest.mark.parametrize("name", sorted(RECURRENT.keys() - FAMILY_VARIANTS))
each_decoder = pytest.mark.parametrize("name", RECURRENT)


def driver(runner: TorchRunner, chunk: int, *, snapshot_every: int = 0) -> Driver:
    return Driver(
        runner,
        num_blocks=runner.kv_memory.num_blocks,
        block_size=BLOCK_SIZE,
        chunk=chunk,
        snapshot_every=snapshot_every,
    )


@each_other_family
@pytest.mark.parametrize("chunk", [CHUNK, 1 << 20])
def test_greedy_tokens_equal_those_of_transformers(
    name: str, chunk: int, family_runner: LoadRunner, family_folder: FolderOf
) -> None:
    prompts = [PROMPT, prompt_of(1), prompt_of(33)]
    running = driver(family_runner(name), chunk, snapshot_every=BLOCK_SIZE)

    batched = running.run(*drives_of(prompts, num_tokens=NUM_TOKENS))

    folder = family_folder(name)
    assert batched == [
        reference_choices(folder, prompt, answer, NUM_TOKENS)
        for prompt, answer in zip(prompts, batched, strict=True)
    ]
    assert len(set(batched[0])) > 4


@each_other_decoder
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


@each_other_family
def test_logprobs_equal_those_of_transformers(
    name: str, family_runner: LoadRunner, family_folder: FolderOf
) -> None:
    sampling = SamplingParams(temperature=1.3, top_k=50, logprobs=3, prompt_logprobs=0)
    drive = Drive(RequestId("r"), prompt_of(50), sampling=sampling, seed=5, num_tokens=24)

    driver(family_runner(name), chunk=24).run(drive)

    expected = reference_logprobs(family_folder(name), drive.tokens)
    logprobs = [*(each for each in drive.prompt_logprobs if each is not None), *drive.logprobs]
    assert len(logprobs) == len(drive.tokens) - 1
    errors = torch.tensor(
        [
            abs(found.logprob - float(row[found.token_id]))
            for found, row in zip(logprobs, expected, strict=False)
        ]
    )
    assert errors.max() < TOLERANCE
    assert errors.median() < MEDIAN_TOLERANCE


def test_tensors_of_olmo_hybrid_have_either_of_two_names(
    family_runner: LoadRunner, family_folder: FolderOf, tmp_path: Path
) -> None:
    renamed = shutil.copytree(family_folder("olmo-hybrid"), tmp_path / "renamed")
    names = {"attention_layer_norm": "input_layernorm"}
    names |= {"feedforward_layer_norm": "post_attention_layernorm"}
    tensors = load_file(renamed / "model.safetensors")
    for name in list(tensors):
        layer, _, stem = name.removesuffix(".weight").rpartition(".")
        if stem in names:
            tensors[f"{layer}.{names[stem]}.weight"] = tensors.pop(name)
    save_file(tensors, renamed / "model.safetensors")
    drives = [Drive(RequestId("r"), PROMPT, num_tokens=8) for _ in range(2)]

    driver(family_runner("olmo-hybrid"), CHUNK).run(drives[0])
    with load_runner(RunnerConfig(str(renamed), kv_cache_bytes=1 << 20)) as runner:
        driver(runner, CHUNK).run(drives[1])

    assert drives[1].outputs == drives[0].outputs


@each_decoder
# In one pass with several snapshots; at the end of a pass; in passes that cross a block.
@pytest.mark.parametrize("chunk", [1 << 20, BLOCK_SIZE, CHUNK])
def test_a_request_continues_from_each_of_its_snapshots(
    name: str, chunk: int, family_runner: LoadRunner, family_folder: FolderOf
) -> None:
    drive = Drive(RequestId("r"), PROMPT, num_tokens=18)
    neighbour = Drive(RequestId("other"), prompt_of(37, seed=3), num_tokens=26)
    running = driver(family_runner(name), chunk, snapshot_every=BLOCK_SIZE)
    running.add(drive)
    running.add(neighbour)
    while len(drive.outputs) < 12:
        running.step()
    assert sorted(drive.snapshots) == [16, 32, 48, 64, 80]

    for num_tokens in sorted(drive.snapshots, reverse=True):
        running.rewind(drive.request_id, num_tokens)
        running.step()
    running.run()

    folder = family_folder(name)
    assert drive.outputs == reference_choices(folder, PROMPT, drive.outputs, 18)
    assert neighbour.outputs == reference_choices(folder, neighbour.prompt, neighbour.outputs, 26)


@each_other_decoder
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
    drive = Drive(RequestId("r"), prompt_of(150), sampling=sampling, num_tokens=12)
    driver(runner, chunk=CHUNK).run(drive)
    # Its tokens again, as a prompt in other chunks.
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    again = Drive(RequestId("again"), drive.tokens, sampling=sampling, num_tokens=1)
    driver(runner, chunk=9).run(again)

    found = torch.tensor([each.logprob for each in again.prompt_logprobs if each is not None])
    expected = half_reference_logprobs(family_folder(name), drive.tokens)
    assert (found - expected).abs().median() < HALF_TOLERANCE
    # As exact as transformers in the same dtype, but for near ties between experts.
    exact = reference_logprobs(family_folder(name), drive.tokens)[:-1]
    exact = exact.gather(1, torch.tensor(drive.tokens[1:])[:, None])[:, 0]
    assert (found - exact).abs().median() < 1.5 * (expected - exact).abs().median() + 0.01
    if kernels == "native":
        assert found[-12:].tolist() == [each.logprob for each in drive.logprobs]
