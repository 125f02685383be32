"""Copies between host and device in a step's sampling: one each way, and no other wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.ids import BlockId, RequestId
from baton.core.output import Failure
from baton.core.sampling import SamplingParams
from baton.engine.plan import Plan, PlanRow, RunResult
from baton.engine.runner.batch.input_batch import PersistentBatch
from baton.engine.runner.device.device import CPU, Device
from baton.engine.runner.device.step_inputs import PackedInputs, make_inputs
from baton.engine.runner.model.ops import Ops
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.runner.sampling.logprobs import PackedPeaks
from baton.engine.runner.sampling.output_heads import HiddenStates
from baton.engine.runner.sampling.prompt_logprobs import LOGITS_CHUNK_ROWS, PromptLogprobs
from baton.engine.runner.sampling.sampler import NOT_FINITE, Sampler, Samples
from baton.engine.runner.sampling.torch_sampling import TORCH_SAMPLING, SamplingBackend
from tests.support.fake_device import Counts, FakeDevice
from tests.support.token_runs import allow_only, make_run, sample
from tests.support.triton_parts import kernels_on, require_triton, triton_sampling

VOCAB_SIZE = 50
EOS = (7, 8)
KNOWN = (1, 3, 3, 5)
SETTINGS: dict[str, dict[str, Any]] = {
    "random": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "all filters": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "counts": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {3: 5.0, 9: -1.0}},
    "allowed": {"allowed_token_ids": (3, 9, 11), "banned_token_ids": (9,)},
    "sequences": {"temperature": 0.0, "banned_sequences": ((5, 2), (3, 4), (6,))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (20,)},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "drawn logprobs": {"logprobs": 0},
    "forbidden": {"allowed_token_ids": (4,), "banned_token_ids": (4,)},
}


def row(seed: int = 0, **requested: Any) -> TokenRun:
    return make_run(KNOWN, SamplingParams(**requested), num_prompt_tokens=2, seed=seed)


def random_logits(num_rows: int) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(num_rows))


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.triton)])
def sampling(request: pytest.FixtureRequest) -> SamplingBackend:
    return TORCH_SAMPLING if request.param == "torch" else triton_sampling()


@contextmanager
def device_for(sampling: SamplingBackend) -> Iterator[FakeDevice]:
    device = FakeDevice()
    with device, nullcontext() if sampling is TORCH_SAMPLING else kernels_on(device):
        yield device


def check_copies(device: FakeDevice, num_to_device: int) -> None:
    """Check the copies to the device, and that the one back is what the CPU waits for."""
    assert device.counts.copies_in == ["runner/device/step_inputs.py:send"] * num_to_device
    assert device.counts.copies_out == ["runner/device/step_outputs.py:send"]
    assert device.counts.synchronizations == ["runner/device/step_outputs.py:read"]


def check(
    sampling: SamplingBackend, logits: Tensor, runs: Sequence[TokenRun], num_to_device: int = 1
) -> None:
    """Check the copies of a step, and that its samples are those of the CPU."""
    expected = sample(Sampler(EOS), logits, runs)

    with device_for(sampling) as device:
        sampler, inputs = Sampler(EOS, sampling=sampling, device=device), PackedInputs(device)
        on_device = logits.to(device.torch_device)
        device.counts = Counts()
        samples = sample(sampler, on_device, runs, inputs)

    check_copies(device, num_to_device)
    check_samples(samples, expected)


def check_samples(samples: Samples, expected: Samples) -> None:
    assert samples.choices == expected.choices
    assert samples.logprobs.keys() == expected.logprobs.keys()
    for index, wanted in expected.logprobs.items():
        found = samples.logprobs[index]
        assert (found.token_id, found.rank) == (wanted.token_id, wanted.rank)
        assert [each for each, _ in found.top] == [each for each, _ in wanted.top]
        values = [found.logprob, *dict(found.top).values()]
        assert values == pytest.approx([wanted.logprob, *dict(wanted.top).values()], abs=1e-5)


def test_a_greedy_step_copies_nothing_to_the_device(sampling: SamplingBackend) -> None:
    check(sampling, random_logits(3), [row(temperature=0.0)] * 3, num_to_device=0)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_takes_one_copy_each_way(sampling: SamplingBackend, name: str) -> None:
    runs = [row(1, **SETTINGS[name]), row(temperature=0.0), row(2, **SETTINGS[name])]

    check(sampling, random_logits(3), runs)


def test_rows_of_all_kinds_take_one_copy_each_way_together(sampling: SamplingBackend) -> None:
    runs = [row(seed, **each) for seed, each in enumerate(SETTINGS.values())]
    runs += [allow_only(run, (2, 7, 40), VOCAB_SIZE) for run in runs]
    logits = random_logits(len(runs))
    logits[3, 5] = torch.nan

    check(sampling, logits, runs)


def test_a_grammar_that_allows_only_an_end_token_takes_one_copy_each_way(
    sampling: SamplingBackend,
) -> None:
    check(sampling, random_logits(2), [allow_only(row(min_tokens=9), EOS, VOCAB_SIZE), row()])


# Rows, and the launches of a step with them besides its graph: two copies, the draw, and one that
# packs results that the graph has not packed.
REPLAYED = {
    "random": ({"temperature": 0.8, "top_k": 9, "top_p": 0.9}, 2 + 1),
    "allowed": (SETTINGS["allowed"], 2 + 3 + 1),  # constrain, choose, draw
    "bias": (SETTINGS["bias"], 2 + 5 + 1),  # and zeros with the biases
    "penalties": (SETTINGS["repetition"] | {"presence_penalty": 0.5}, 2 + 4 + 1),
    "logprobs": (SETTINGS["logprobs"], 1 + 1 + 1),  # greedy, without parameters to copy
}


MORE = ("random", "allowed", "bias", "some")


@pytest.mark.parametrize("has_grammar", [False, pytest.param(True, marks=pytest.mark.triton)])
@pytest.mark.parametrize(
    "name",
    ["penalties", "logprobs", *(pytest.param(name, marks=pytest.mark.triton) for name in MORE)],
)
def test_sampling_behind_a_graph_allocates_nothing(name: str, *, has_grammar: bool) -> None:
    """The peaks of a padded batch are found by its graph, and its rows are drawn in their place."""
    require_triton()
    logits, rows_of_all = random_logits(4), [settings for settings, _ in REPLAYED.values()]
    settings = rows_of_all[-3:] if name == "some" else [REPLAYED[name][0]] * 3
    runs = [row(seed, **each) for seed, each in enumerate(settings)]
    if has_grammar:
        runs[1] = allow_only(runs[1], (2, 3, 7, 9, 40), VOCAB_SIZE)
    expected = sample(Sampler(EOS), logits[:3], runs)

    sampling = triton_sampling()
    with device_for(sampling) as device:
        sampler, inputs = Sampler(EOS, sampling=sampling, device=device), PackedInputs(device)
        on_device = logits.to(device.torch_device)
        for _ in range(3):  # the first steps allocate the buffers
            peaks = PackedPeaks.of(Ops().find_peaks(on_device))
            device.counts = Counts()
            inputs.begin()
            step = sampler.begin(runs, VOCAB_SIZE, inputs)
            inputs.send()
            samples = sampler.read(sampler.launch(step, on_device[:3], peaks))

    check_samples(samples, expected)
    assert device.counts.allocations == 0
    if name != "some" and not has_grammar:
        assert device.counts.launches == REPLAYED[name][1]


class OneLayer:
    """Decoder whose logits are the hidden states."""

    def logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * 2


def collect_prompt_logprobs(hidden_states: Tensor, device: Device = CPU) -> RunResult:
    """Compute the prompt logprobs of two requests, one of them not finite, and of no third."""
    batch, result = PersistentBatch(4, 512, 256), RunResult()
    sampling = [SamplingParams(prompt_logprobs=num) for num in (2, 0, None)]
    lengths = [2 * LOGITS_CHUNK_ROWS - 1, 3, 4]
    rows = []
    for num, each in zip(lengths, sampling, strict=True):
        token_ids = tuple(index % VOCAB_SIZE for index in range(num))
        rows.append(PlanRow(RequestId(str(num)), token_ids, num, 0, ((BlockId(0),),), each, 0))
    batch.apply(Plan(started=tuple(rows)))
    step = batch.step({row.request_id: row.num_prompt_tokens for row in rows})
    head, inputs = PromptLogprobs(OneLayer(), device), make_inputs(device)  # type: ignore[arg-type]
    inputs.begin()
    head_pass = head.begin(step, inputs)
    inputs.send()
    assert head_pass is not None
    head_pass.launch(HiddenStates(hidden_states, hidden_states))
    head_pass.collect(result)
    return result


def test_prompt_logprobs_of_all_requests_take_one_copy_each_way() -> None:
    hidden_states = random_logits(2 * LOGITS_CHUNK_ROWS - 1 + 3 + 4)
    hidden_states[1, 3] = torch.inf  # of the second request: shorter prompts come first
    expected = collect_prompt_logprobs(hidden_states)

    with FakeDevice() as device:
        on_device = hidden_states.to(device.torch_device)
        device.counts = Counts()
        result = collect_prompt_logprobs(on_device, device)

    check_copies(device, 1)
    assert result == expected
    assert list(result.failures.values()) == [Failure(NOT_FINITE)]
    assert [len(entries) for entries in result.prompt_logprobs.values()] == [255]
