"""Passes launched before the result of the one before is known, on a simulated device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.output import Output
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.plan import Runner
from baton.engine.runner.kernels.choose import TORCH, Parts
from baton.engine.runner.load import load_runner
from baton.engine.runner.sampling.sampler import NOT_FINITE
from baton.engine.spec_decode.config import Speculation
from tests.support.device_engines import (
    GREEDY,
    POISON,
    RANDOM,
    answers,
    answers_on_the_cpu,
    engine_of,
    poisoned_copy,
    requests_of,
    without_logprobs,
)
from tests.support.device_runners import GRAPHABLE, RunnerOnThreads, config_of, runner_on
from tests.support.fake_device import Costs, Counts, FakeDevice

pytestmark = pytest.mark.usefixtures("one_thread")

READ = "runner/device/step_outputs.py:read"
PARTS = pytest.mark.parametrize(
    "parts", [TORCH, pytest.param(GRAPHABLE, marks=pytest.mark.triton)], ids=["eager", "graphs"]
)  # graphs: long, as the tests of Triton's kernels


@pytest.fixture(scope="module")
def poisoned_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poisoned_copy(folder, tmp_path_factory.mktemp("poisoned") / "llama")


@PARTS
def test_a_pass_takes_the_tokens_of_the_one_before_without_the_host(
    folder: Path, parts: Parts
) -> None:
    """The device still has work when the host gets tokens, and each step waits once."""
    requests = requests_of(GREEDY, replace(RANDOM, min_tokens=2), replace(RANDOM, max_tokens=3))
    device = FakeDevice(costs=Costs(launch_s=1.0, copy_s=1.0, replay_s=1.0))
    with runner_on(device, folder, parts) as runner:
        on_threads = RunnerOnThreads(runner.launch, device)
        device.counts = Counts()
        found = answers(engine_of(on_threads), requests)

    assert found == answers_on_the_cpu(folder, requests)
    assert on_threads.busy[:5] == [True, True, True, True, False]
    assert device.counts.synchronizations[:5] == [READ] * 5


def test_a_replayed_step_adds_two_launches_and_allocates_nothing(folder: Path) -> None:
    device = FakeDevice()
    with runner_on(device, folder) as runner:
        engine = engine_of(RunnerOnThreads(runner.launch, device))
        for request in requests_of(*[replace(GREEDY, max_tokens=9)] * 3):
            engine.scheduler.add(request)
        for _ in range(3):
            engine.step()
        device.counts = Counts()

        engine.step()

        counts, device.counts = device.counts, Counts()
        engine.close()
    assert (counts.replays, counts.launches, counts.allocations) == (1, 4, 0)
    assert len(counts.copies_in) == len(counts.copies_out) == len(counts.synchronizations) == 1


@PARTS
def test_requests_of_all_kinds_get_the_outputs_of_synchronous_steps(
    poisoned_folder: Path, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests end by length, by a stop token, and by NaN; others need the tokens before."""
    form = StructuredOutputs(regex="not used")
    formed = replace(GREEDY, structured_outputs=form, ignore_eos=False)
    requests = requests_of(
        replace(RANDOM, stop_token_ids=tuple(range(0, POISON, 9)), max_tokens=9),
        replace(RANDOM, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2),
        replace(formed, logprobs=0),
        replace(formed, allowed_token_ids=(45, POISON)),  # the second token has no choice
        replace(GREEDY, allowed_token_ids=(POISON,)),
        replace(GREEDY, prompt_logprobs=1, max_tokens=2),
        replace(RANDOM, banned_sequences=((3, 4), (5,)), max_tokens=8),
        length=7,
    )
    device = FakeDevice()
    with runner_on(device, poisoned_folder, parts) as runner:
        on_threads = RunnerOnThreads(runner.launch, device)
        found = answers(engine_of(on_threads), requests)

    expected = answers_on_the_cpu(poisoned_folder, requests)
    failures = [output.failure for output in found["4"] if output.failure is not None]
    assert [NOT_FINITE in failure.reason for failure in failures] == [True]
    assert without_logprobs(found) == without_logprobs(expected)
    assert "pass over" not in caplog.text  # none failed
    for name in ("3", "4"):  # they fail once
        assert sum(name in result.failures for result in on_threads.results) == 1
    assert sum(on_threads.busy) > len(on_threads.busy) // 2


def test_rows_that_need_their_tokens_wait_for_them_behind_the_forward_pass(folder: Path) -> None:
    requests = requests_of(replace(RANDOM, presence_penalty=0.5), GREEDY)
    device = FakeDevice()
    with runner_on(device, folder, TORCH) as runner:
        on_threads = RunnerOnThreads(runner.launch, device)
        device.counts = Counts()
        found = answers(engine_of(on_threads), requests)

    assert found == answers_on_the_cpu(folder, requests)
    assert on_threads.busy[:4] == [True] * 4
    assert device.counts.copies_in[:4] == ["runner/device/step_inputs.py:send"] * 4


@PARTS
def test_with_speculation_passes_follow_at_once_that_have_too_many_rows_for_drafts(
    folder: Path, parts: Parts
) -> None:
    """The first request gets drafts while it decodes alone, before and after the others."""
    repeats = replace(GREEDY, max_tokens=40, allowed_token_ids=(45, 46, 47))
    first, *others = requests_of(repeats, GREEDY, RANDOM)
    speculation = Speculation(3, min_ngram=1, max_rows=3, is_adaptive=False)
    device, settings = FakeDevice(), {"speculation": speculation}

    def run(runner: Runner, *, async_scheduling: bool) -> dict[str, list[int]]:
        """Return the tokens of all requests."""
        engine = engine_of(runner, async_scheduling=async_scheduling, num_lookahead_tokens=3)
        engine.scheduler.add(first)
        begun: list[Output] = []
        while not engine.scheduler.stats().total_accepted_tokens:
            begun += engine.step()
            assert len(begun) < 20
        found = answers(engine, others)
        found["0"] = [*begun, *found["0"]]
        return {
            name: [token_id for output in outputs for token_id in output.token_ids]
            for name, outputs in found.items()
        }

    with runner_on(device, folder, parts, **settings) as runner:
        on_threads = RunnerOnThreads(runner.launch, device)
        found = run(on_threads, async_scheduling=True)
    with load_runner(config_of(folder, **settings)) as runner:
        expected = run(runner, async_scheduling=False)

    assert found == expected
    have_drafts = [bool(result.num_proposed) for result in on_threads.results]
    follows = [*on_threads.follows, False]
    for index, has_drafts in enumerate(have_drafts):
        assert not (has_drafts and (follows[index] or follows[index + 1]))
    assert sum(follows) > 2
    assert True in have_drafts[follows.index(True) :]


@pytest.mark.parametrize("place", ["launch", "collect"])
def test_passes_after_one_that_failed_are_run_again(folder: Path, place: str) -> None:
    """A pass is launched behind the one whose result is lost, or fails behind one that is right."""
    requests = requests_of(GREEDY, RANDOM, replace(RANDOM, max_tokens=9))
    device = FakeDevice()
    with runner_on(device, folder, TORCH) as runner:
        on_threads = RunnerOnThreads(runner.launch, device)
        engine = engine_of(on_threads)
        if place == "collect":
            on_threads.fails_at_collect = 3
        else:
            answers(engine_of(on_threads), requests_of(GREEDY))
            device.fails_at_launch = device.counts.launches + 200
        found = answers(engine, requests)

    assert found == answers_on_the_cpu(folder, requests)
    assert on_threads.num_launched > 11
