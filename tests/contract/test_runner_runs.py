"""Passes of a runner: hooks, contained faults and state between passes."""

from __future__ import annotations

import ctypes
import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.ids import BlockId, RequestId
from baton.core.output import Failure, FailureCause, Output, TokenLogprobs
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.core import EngineCore
from baton.engine.errors import PassHookFailed
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, PlanRow, RunResult
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model_info import NO_LAYER, KvMemory
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.sampling.sampler import NOT_FINITE
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.spec_decode.config import Speculation
from baton.kv_transfer.fence import Fence
from tests.support.fake_runner import run_plan
from tests.support.models import VARIANTS, make_model_folder, prompt_of
from tests.support.runner_drivers import GREEDY, Drive, Driver

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16
NUM_BLOCKS = 60
POISON = 300  # the token whose embedding is NaN


@pytest.fixture(scope="module")
def poisoned_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the model with one token whose embedding is NaN."""
    spoilt = tmp_path_factory.mktemp("poisoned") / "llama"
    shutil.copytree(folder, spoilt)
    tensors = load_file(spoilt / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, spoilt / "model.safetensors")
    return spoilt


def load(folder: Path, *, max_num_seqs: int = 32) -> TorchRunner:
    block_bytes = 2 * 2 * 2 * 16 * BLOCK_SIZE * 4
    return load_runner(
        RunnerConfig(
            str(folder),
            block_size=BLOCK_SIZE,
            kv_cache_bytes=NUM_BLOCKS * block_bytes,
            max_num_seqs=max_num_seqs,
        )
    )


def drive(name: str, prompt: tuple[int, ...], *, num_tokens: int = 12) -> Drive:
    return Drive(RequestId(name), prompt, num_tokens=num_tokens)


def driver(runner: TorchRunner) -> Driver:
    return Driver(runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, chunk=20)


def row(name: str, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> PlanRow:
    ids = tuple(BlockId(block) for block in blocks)
    return PlanRow(RequestId(name), tokens, len(tokens), 0, (ids,), GREEDY, 0)


def layer_of(memory: KvMemory, block: int, layer: int) -> np.ndarray:
    """Return the KV of a block's layer, read at the address that the runner publishes."""
    start = memory.address + block * memory.block_bytes + layer * memory.blocks.layer_bytes
    raw = (ctypes.c_char * memory.blocks.layer_bytes).from_address(start)
    return np.frombuffer(bytes(raw), dtype=np.float32)


class SeenLayers:
    """Hook that reads the KV memory on each call."""

    def __init__(self, memory: KvMemory, block: int) -> None:
        self._memory = memory
        self._block = block
        self.reported: list[tuple[str, list[bool]]] = []

    def layer_done(self, layer: int, fence: Fence) -> None:
        assert fence.is_passed  # the CPU computes synchronously
        self._note(f"layer {layer}")

    def pass_done(self) -> None:
        self._note("pass")

    def _note(self, what: str) -> None:
        layers = range(self._memory.blocks.num_layers)
        written = [bool(layer_of(self._memory, self._block, each).all()) for each in layers]
        self.reported.append((what, written))


def test_the_hook_is_called_for_a_layer_once_its_kv_is_in_memory(folder: Path) -> None:
    with load(folder) as runner:
        runner.hook = SeenLayers(runner.kv_memory, block=7)

        name = RequestId("r")
        prompt = prompt_of(BLOCK_SIZE)
        run_plan(runner, Plan(started=(row(name, prompt, (7,)),), num_scheduled_tokens={name: 16}))

        assert runner.hook.reported == [
            ("layer 0", [True, False]),
            ("layer 1", [True, True]),
            ("pass", [True, True]),
        ]


def test_a_request_with_nan_ends_alone(poisoned_folder: Path) -> None:
    prompts = [prompt_of(30), (5, POISON, 9), prompt_of(17)]
    prompts = [tuple(t if t != POISON or len(p) == 3 else 4 for t in p) for p in prompts]
    with load(poisoned_folder) as runner:
        alone = [driver(runner).run(drive("a", p))[0] for p in (prompts[0], prompts[2])]
        drives = [drive(f"r{i}", prompt) for i, prompt in enumerate(prompts)]

        together = driver(runner).run(*drives)

    assert POISON not in {token for answer in together for token in answer}
    assert [each.failure for each in drives] == [None, Failure(NOT_FINITE), None]
    assert together == [alone[0], [], alone[1]]


def test_blocks_that_held_nan_can_be_reused(poisoned_folder: Path) -> None:
    prompt = tuple(t if t != POISON else 4 for t in prompt_of(21))
    with load(poisoned_folder) as runner:
        before = driver(runner).run(drive("before", prompt))[0]
        # The driver reuses the most recently freed blocks first.
        shared = driver(runner)
        shared.run(drive("poisoned", (POISON,) * 70))

        after = shared.run(drive("after", prompt))[0]

    assert after == before


def test_prompt_logprobs_of_nan_are_an_error_too(poisoned_folder: Path) -> None:
    requested = drive("r", (5, POISON, 9, 11))
    requested.sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)

    with load(poisoned_folder) as runner:
        driver(runner).run(requested)

    assert requested.failure == Failure(NOT_FINITE)


def test_an_empty_plan_yields_no_result(folder: Path) -> None:
    with load(folder) as runner:
        result = run_plan(runner, Plan(started=(row("r", (1, 2), (0,)),)))
        run_plan(runner, Plan(dropped=(RequestId("r"),)))

    assert result == RunResult()


def test_a_row_in_the_middle_of_its_prompt_is_not_sampled(folder: Path) -> None:
    name, prompt = RequestId("r"), prompt_of(20)
    with load(folder) as runner:
        first = run_plan(
            runner, Plan(started=(row(name, prompt, (0, 1)),), num_scheduled_tokens={name: 19})
        )
        last = run_plan(runner, Plan(num_scheduled_tokens={name: 1}))

    assert first.token_ids == {}
    assert len(last.token_ids[name]) == 1


def test_a_reused_slot_keeps_nothing_of_its_last_row(folder: Path) -> None:
    with load(folder, max_num_seqs=1) as runner:
        expected = [driver(runner).run(drive("x", prompt_of(n)))[0] for n in (50, 3)]
        shared = driver(runner)

        found = [shared.run(drive(f"r{n}", prompt_of(n)))[0] for n in (50, 3)]

    assert found == expected


def test_dynamic_rope_limits_the_shareable_prompt_length(
    tmp_path: Path,
) -> None:
    folder = make_model_folder(tmp_path / "dynamic", VARIANTS["llama-rope-dynamic"])

    with load_runner(RunnerConfig(str(folder), kv_cache_bytes=1 << 20)) as runner:
        info = runner.info

    trained = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    assert info.max_shareable_prompt_len == trained
    assert info.max_model_len == 4 * trained


def test_thousands_of_requests_leak_no_memory(folder: Path) -> None:
    def serve(num_batches: int) -> None:
        for batch in range(num_batches):
            drives = [drive(f"{batch}.{i}", (3, 4 + i, 5), num_tokens=2) for i in range(32)]
            for each in drives:
                each.sampling = SamplingParams(frequency_penalty=0.1, prompt_logprobs=1, top_p=0.9)
            driver(runner).run(*drives)

    with load(folder) as runner:
        serve(40)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        serve(130)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert after - before < 1700, f"the peak grew by {after - before} KiB"


NO_TOKEN = 10**6  # beyond the vocabulary: the embedding has no such row
CHUNK = 24


def engine_of(runner: TorchRunner, *, async_scheduling: bool = False) -> EngineCore:
    """Return an engine whose limits never restrict the runner."""
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        max_model_len=runner.info.max_model_len,
        num_lookahead_tokens=runner.speculation.num_tokens if runner.speculation else 0,
        async_scheduling=async_scheduling,
    )
    cache = CacheConfig(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    return EngineCore(Scheduler(config, cache), runner)


def config_of(folder: Path, speculation: Speculation | None) -> RunnerConfig:
    return RunnerConfig(
        str(folder),
        block_size=BLOCK_SIZE,
        kv_cache_bytes=NUM_BLOCKS * 2 * 2 * 2 * 16 * BLOCK_SIZE * 4,
        max_num_seqs=8,
        kernels="torch",
        speculation=speculation,
    )


def answers(engine: EngineCore, requests: list[EngineRequest]) -> dict[str, list[Output]]:
    for request in requests:
        engine.scheduler.add(request)
    found: dict[str, list[Output]] = {}
    while engine.scheduler.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    engine.close()
    engine.scheduler.check()
    return found


def prompt_logprobs_in(outputs: list[Output]) -> list[TokenLogprobs | None]:
    return [entry for output in outputs for entry in output.prompt_logprobs]


@pytest.mark.parametrize(
    "speculation", [None, Speculation(2, is_adaptive=False)], ids=["plain", "drafts"]
)
def test_a_pass_failed_by_one_request_is_repeated_without_it(
    folder: Path, speculation: Speculation | None
) -> None:
    """The other requests continue in the middle of their prompts, with logprobs across chunks."""
    sampling = replace(GREEDY, max_tokens=6, prompt_logprobs=0, ignore_eos=True)
    good = [
        EngineRequest(RequestId(str(n)), prompt_of(length), sampling, seed=n)
        for n, length in enumerate((60, 7, 33))
    ]
    bad = EngineRequest(RequestId("bad"), (5, NO_TOKEN, 9), GREEDY, seed=0)
    with load_runner(config_of(folder, speculation)) as runner:
        expected = answers(engine_of(runner), good)
        found = answers(engine_of(runner), [good[0], bad, *good[1:]])

    (failed,) = found.pop("bad")
    assert failed.failure is not None
    assert failed.failure.cause is FailureCause.PASS
    for name, outputs in expected.items():
        its_own = found[name]
        assert [t for o in its_own for t in o.token_ids] == [
            t for o in outputs for t in o.token_ids
        ]
        reported = prompt_logprobs_in(its_own)
        assert [one and one.token_id for one in reported] == [
            one and one.token_id for one in prompt_logprobs_in(outputs)
        ]


def test_asynchronous_scheduling_changes_no_output(poisoned_folder: Path) -> None:
    """Requests end in different steps, by length, by a stop token, and by NaN while they decode."""
    some = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, ignore_eos=True)
    samplings = (
        replace(some, stop_token_ids=tuple(range(0, POISON, 9))),
        replace(some, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2),
        replace(some, temperature=0.0, min_tokens=3, max_tokens=4),
        replace(some, allowed_token_ids=(POISON,)),
    )
    requests = [
        EngineRequest(RequestId(str(n)), (5, 6 + n, 7), replace(sampling), seed=n)
        for n, sampling in enumerate(samplings)
    ]
    with load(poisoned_folder) as runner:
        expected = answers(engine_of(runner), requests)
        found = answers(engine_of(runner, async_scheduling=True), requests)

    failure = found["3"][-1].failure
    assert failure is not None
    assert NOT_FINITE in failure.reason
    assert len(found["3"]) == 2
    assert found == expected


@pytest.mark.parametrize(
    "speculation", [None, Speculation(2, is_adaptive=False)], ids=["plain", "drafts"]
)
def test_asynchronous_steps_with_prompts_and_drafts_change_no_token(
    folder: Path, speculation: Speculation | None
) -> None:
    # Of few tokens, so that drafts are accepted.
    few = replace(GREEDY, ignore_eos=True, allowed_token_ids=(5, 9))
    requests = [
        EngineRequest(RequestId(str(n)), prompt_of(length), replace(few, max_tokens=count), 0)
        for n, (length, count) in enumerate(((60, 24), (7, 1), (33, 9), (5, 30)))
    ]
    with load_runner(config_of(folder, speculation)) as runner:
        synchronous, asynchronous = [
            answers(engine_of(runner, async_scheduling=is_async), requests)
            for is_async in (False, True)
        ]

    for name, outputs in synchronous.items():
        expected = [token for output in outputs for token in output.token_ids]
        assert [t for output in asynchronous[name] for t in output.token_ids] == expected
    if speculation is not None:
        assert any(len(output.token_ids) > 1 for its in asynchronous.values() for output in its)


def test_a_retry_keeps_its_layers_until_the_pass_has_ended(folder: Path) -> None:
    with load(folder) as runner:
        runner.hook = hook = SeenLayers(runner.kv_memory, block=7)
        name = RequestId("r")
        plan = Plan(
            started=(row(name, prompt_of(BLOCK_SIZE), (7,)),), num_scheduled_tokens={name: 16}
        )

        first = run_plan(runner, plan)
        hook.reported.clear()
        again = run_plan(runner, replace(plan, is_retry=True))

    assert again.token_ids == first.token_ids
    assert [what for what, _ in hook.reported] == [f"layer {NO_LAYER}"] * 2 + ["pass"]


def test_a_failed_hook_is_distinguished_from_a_failed_pass(folder: Path) -> None:
    class Broken:
        def layer_done(self, layer: int, fence: Fence) -> None:
            raise ConnectionError("the wire broke")

        def pass_done(self) -> None:
            """Do nothing: the test fails the pass before this."""

    with load(folder) as runner:
        runner.hook = Broken()
        name = RequestId("r")
        plan = Plan(started=(row(name, (1, 2), (7,)),), num_scheduled_tokens={name: 2})

        with pytest.raises(PassHookFailed) as failure:
            run_plan(runner, plan)

    assert isinstance(failure.value.root, ConnectionError)
