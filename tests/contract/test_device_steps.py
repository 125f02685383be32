"""Steps of a runner on a simulated asynchronous device: copies, waits, and graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.checkpoint.peft_folder import PeftFolder
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidConfig
from baton.core.ids import BlockId, RequestId
from baton.core.output import Output
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.core.units import format_bytes
from baton.engine.core import EngineCore
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.runner.device.graphs import EagerCause, GraphSize
from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.kernels.choose import TORCH, Parts
from baton.engine.runner.load import load_runner
from baton.engine.runner.model.pass_layout import empty_layout
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.passes.decode_graphs import DecodeBatch, DecodeGraphs, Prepare
from baton.engine.runner.state.state_tables import empty_states
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.structured_output.llguidance_backend import GrammarLibrary
from baton.kv_transfer.fence import Fence
from tests.support.adapters import write_adapter
from tests.support.device_runners import GRAPHABLE, config_of, runner_on
from tests.support.fake_device import Costs, Counts, FakeDevice
from tests.support.families import FAMILY_VARIANTS, STATE_VARIANTS
from tests.support.models import (
    EOS_TOKEN_ID,
    VARIANTS,
    VOCAB_SIZE,
    make_model_folder,
    prompt_of,
)
from tests.support.runner_drivers import Drive, Driver
from tests.support.triton_parts import interpreted_parts, kernels_on, require_triton

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16
NUM_BLOCKS = 200
NOTHING = DecodeBatch(np.zeros(0, np.int64), empty_layout(1), None)
T = TypeVar("T")
LENGTHS = (3, 9, 17)
NUM_TOKENS = 4
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=64),
    "random": SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        repetition_penalty=1.1,
        presence_penalty=1.0,
        logprobs=2,
        max_tokens=64,
    ),
}


@pytest.fixture(scope="module")
def recurrent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3.5"), STATE_VARIANTS["qwen3.5"])


def driver_of(runner: TorchRunner, **settings: Any) -> Driver:
    num_blocks = min(NUM_BLOCKS, runner.kv_memory.num_blocks)
    return Driver(runner, num_blocks=num_blocks, block_size=BLOCK_SIZE, **settings)


def drives(
    num_tokens: int = NUM_TOKENS, lengths: tuple[int, ...] = LENGTHS, **sampling: Any
) -> list[Drive]:
    params = SamplingParams(temperature=0.0, max_tokens=64, **sampling)
    return [
        Drive(RequestId(f"r{number}"), prompt_of(length), params, num_tokens=num_tokens)
        for number, length in enumerate(lengths)
    ]


def outputs_on_the_cpu(folder: Path, *requests: Any) -> list[list[int]]:
    with load_runner(config_of(folder)) as runner:
        return driver_of(runner).run(*drives(*requests))


# --- eager steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1 << 30, 8])
def test_tokens_equal_those_of_the_cpu(folder: Path, chunk: int) -> None:
    with runner_on(FakeDevice(), folder, TORCH) as runner:
        outputs = driver_of(runner, chunk=chunk).run(*drives())

    assert outputs == outputs_on_the_cpu(folder)


@pytest.mark.triton  # long, as the tests of Triton's kernels
def test_tokens_of_a_model_with_recurrent_layers_equal_those_of_the_cpu(
    recurrent_folder: Path,
) -> None:
    with runner_on(FakeDevice(), recurrent_folder, TORCH) as runner:
        outputs = driver_of(runner, chunk=12, snapshot_every=16).run(*drives(2))

    assert outputs == outputs_on_the_cpu(recurrent_folder, 2)


@pytest.mark.parametrize("name", ["greedy", "random"])
@pytest.mark.parametrize(
    "parts", [TORCH, pytest.param(GRAPHABLE, marks=pytest.mark.triton)], ids=["eager", "graphs"]
)  # graphs: long, as the tests of Triton's kernels
def test_a_step_with_20_decodes_makes_a_copy_each_way_and_waits_once(
    folder: Path, parts: Parts, name: str, tmp_path: Path
) -> None:
    device, params = FakeDevice(), SAMPLING[name]
    with runner_on(device, folder, parts, max_num_seqs=20, max_loras=2) as runner:
        driver, table = driver_of(runner), runner.adapters
        assert table is not None
        ids = ("", "0", "1") if parts is TORCH else ("",)
        for adapter_id in ids[1:]:
            files = write_adapter(folder, tmp_path / adapter_id, seed=int(adapter_id))
            table.add(adapter_id, table.load(PeftFolder(files)))
        for index, drive in enumerate(drives(lengths=(3,) * 20)):
            driver.add(replace(drive, sampling=params, adapter=ids[index % len(ids)]))
        driver.step()
        device.counts = Counts()

        driver.step()

    assert device.counts.replays == (parts is GRAPHABLE)
    assert device.counts.copies_in == ["runner/device/step_inputs.py:send"]
    assert device.counts.copies_out == ["runner/device/step_outputs.py:send"]
    assert device.counts.synchronizations == ["runner/device/step_outputs.py:read"]


@pytest.mark.parametrize("parts", [TORCH, GRAPHABLE], ids=["eager", "graphs"])
def test_random_rows_take_one_copy_each_way_in_each_step(folder: Path, parts: Parts) -> None:
    def requests() -> list[Drive]:
        return [replace(drive, sampling=SAMPLING["random"]) for drive in drives()]

    device = FakeDevice()
    with runner_on(device, folder, parts) as runner:
        device.counts = Counts()
        outputs = driver_of(runner).run(*requests())
    with load_runner(config_of(folder)) as runner:
        expected = driver_of(runner).run(*requests())

    assert outputs == expected
    assert len(device.counts.copies_in) == NUM_TOKENS
    assert len(device.counts.copies_out) == NUM_TOKENS
    waits = ["runner/device/step_outputs.py:read"] * NUM_TOKENS
    assert device.counts.synchronizations == [*waits, "runner/passes/forward_passes.py:collect"]


def test_a_chunk_that_samples_nothing_is_waited_for_once(folder: Path) -> None:
    device = FakeDevice()
    with runner_on(device, folder, TORCH) as runner:
        driver = driver_of(runner, chunk=8)
        driver.add(drives(lengths=(33,))[0])
        device.counts = Counts()

        driver.step()

        assert device.is_idle
    assert device.counts.copies_in == ["runner/device/step_inputs.py:send"]
    assert device.counts.synchronizations == ["runner/model_runner.py:_collect"]


def test_a_failing_launch_leaves_the_runner_usable(folder: Path) -> None:
    device = FakeDevice()
    [failing] = drives(lengths=(5,))
    with runner_on(device, folder, TORCH) as runner:
        driver = driver_of(runner)
        driver.add(replace(failing, request_id=RequestId("fails")))
        device.fails_at_launch = device.counts.launches + 20
        with pytest.raises(RuntimeError, match="launch failed"):
            driver.step()

        outputs = driver_of(runner).run(*drives())

    assert outputs == outputs_on_the_cpu(folder)


# --- graphs ---------------------------------------------------------------------------------------


def test_decodes_replay_graphs_and_give_the_tokens_of_eager_steps(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    device = FakeDevice()
    with runner_on(device, folder) as runner:
        outputs = driver_of(runner).run(*drives())
        assert runner.graphs is not None
        num_steps = dict(runner.num_passes)
    with runner_on(FakeDevice(), folder, enforce_eager=True) as runner:
        assert runner.graphs is None
        eager = driver_of(runner).run(*drives())

    assert outputs == eager == outputs_on_the_cpu(folder)
    assert f"captured {len(device.graph_launches)} graphs of decode steps:" in caplog.text
    assert num_steps == {EagerCause.PROMPT: 1, GraphSize(4, 8): NUM_TOKENS - 1}
    assert device.counts.replays == NUM_TOKENS - 1


def test_a_replayed_step_of_greedy_rows_is_a_graph_and_two_copies_and_allocates_nothing(
    folder: Path,
) -> None:
    device = FakeDevice()
    with runner_on(device, folder) as runner:
        driver = driver_of(runner)
        for drive in drives():
            driver.add(drive)
        driver.step()
        device.counts = Counts()

        driver.step()

    counts = device.counts
    assert (counts.replays, counts.launches, counts.allocations) == (1, 2, 0)
    assert len(counts.copies_in) == len(counts.copies_out) == len(counts.synchronizations) == 1


FORMS = ("[a-f]{3,9}(-[0-9]{2}){2}", "(the quick|東京){2,4}")  # of the first requests


@pytest.mark.parametrize("sampling", ["torch", pytest.param("triton", marks=pytest.mark.triton)])
def test_replayed_steps_with_grammars_give_the_tokens_of_eager_steps(
    folder: Path, sampling: str
) -> None:
    parts = GRAPHABLE
    if sampling == "triton":
        parts = replace(GRAPHABLE, sampling=interpreted_parts().sampling)
    library = GrammarLibrary(SafetensorsFolder(folder), VOCAB_SIZE, (EOS_TOKEN_ID,))
    grammars = [*(library.compile(StructuredOutputs(regex=form)) for form in FORMS), None]

    def requests() -> list[Drive]:
        pairs = zip(drives(num_tokens=6), grammars, strict=True)
        return [replace(drive, grammar=grammar) for drive, grammar in pairs]

    def outputs(device: FakeDevice, **settings: Any) -> list[list[int]]:
        with (
            kernels_on(device) if sampling == "triton" else nullcontext(),
            runner_on(device, folder, parts, **settings) as runner,
        ):
            return driver_of(runner).run(*requests())

    replayed, device = FakeDevice(), FakeDevice()
    found = outputs(replayed)
    with (
        kernels_on(device) if sampling == "triton" else nullcontext(),
        runner_on(device, folder, parts) as runner,
    ):
        driver = driver_of(runner)
        for drive in requests():
            driver.add(drive)
        for _ in range(2):  # a prompt and the first replay
            driver.step()
        device.counts = Counts()
        driver.step()

    assert found == outputs(FakeDevice(), enforce_eager=True)
    assert found[:2] != outputs_on_the_cpu(folder, 6)[:2]
    assert found[2:] == outputs_on_the_cpu(folder, 6)[2:]
    assert replayed.counts.replays == 5
    assert device.counts.replays == 1
    # Masks follow the other inputs: they are computed while the device does.
    assert (len(device.counts.copies_in), len(device.counts.copies_out)) == (2, 1)
    # The reference of the constraints copies logits; kernels have memory of their own.
    assert device.counts.allocations == 0 or sampling == "torch"


def test_recurrent_layers_replay_graphs(recurrent_folder: Path) -> None:
    device = FakeDevice()
    with runner_on(device, recurrent_folder, max_num_seqs=2) as runner:
        outputs = driver_of(runner).run(*drives(3, (3, 9)))

    assert outputs == outputs_on_the_cpu(recurrent_folder, 3, (3, 9))
    assert device.counts.replays == 2


@pytest.mark.triton
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-moe"])
def test_graphs_of_interpreted_triton_kernels_give_the_tokens_of_the_cpu(
    name: str, tmp_path: Path
) -> None:
    require_triton()
    own, device = make_model_folder(tmp_path, {**VARIANTS, **FAMILY_VARIANTS}[name]), FakeDevice()
    with (
        kernels_on(device),
        runner_on(device, own, interpreted_parts(), max_num_seqs=3) as runner,
    ):
        outputs = driver_of(runner).run(*drives())
        assert runner.graphs is not None
        num_steps = dict(runner.num_passes)

    assert outputs == outputs_on_the_cpu(own)
    assert num_steps == {EagerCause.PROMPT: 1, GraphSize(3, 8): NUM_TOKENS - 1}


@pytest.mark.triton
def test_all_kernels_are_launched_at_start(folder: Path) -> None:
    """Later, the first request would wait until they are compiled."""
    require_triton()
    device = FakeDevice()
    random = replace(SAMPLING["random"], logit_bias={3: 1.0}, banned_token_ids=(5,))
    with (
        kernels_on(device) as names,
        runner_on(device, folder, interpreted_parts(), max_num_seqs=2) as runner,
    ):
        at_start = set(names)
        driver = driver_of(runner)
        driver.add(replace(drives(lengths=(9,))[0], sampling=random))
        for _ in range(2):
            driver.step()

    assert names == at_start
    assert {"draw_kernel", "constrain_kernel", "count_tokens_kernel"} < names


@pytest.mark.triton  # long, as the tests of Triton's kernels
def test_snapshots_are_taken_by_eager_steps(recurrent_folder: Path) -> None:
    with runner_on(FakeDevice(), recurrent_folder) as runner:
        outputs = driver_of(runner, snapshot_every=16).run(*drives(9))
        assert runner.graphs is not None
        num_steps = runner.num_passes

    assert outputs == outputs_on_the_cpu(recurrent_folder, 9)
    assert num_steps[EagerCause.SNAPSHOT]
    assert num_steps[GraphSize(4, 8)]


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_padding_rows_change_no_block(
    folder: Path, recurrent_folder: Path, is_recurrent: bool
) -> None:
    own = recurrent_folder if is_recurrent else folder
    with runner_on(FakeDevice(), own, max_num_seqs=2) as runner:
        num_state_blocks = runner.kv_memory.layout.num_state_blocks
        num_used = 1 + 2 * num_state_blocks
        driver = Driver(runner, num_blocks=num_used, block_size=BLOCK_SIZE)
        driver.add(drives(lengths=(9,))[0])
        for _ in range(3):
            driver.step()
        before = blocks_of(runner)
        states = empty_states(num_state_blocks) if is_recurrent else None
        assert runner.graphs is not None

        with torch.inference_mode():
            replay(runner.graphs, GraphSize(2, 8), NOTHING._replace(states=states))

        assert all(map(any, before[:num_used]))  # so that zeros would be seen
        assert blocks_of(runner) == before


def blocks_of(runner: TorchRunner) -> list[bytes]:
    size = runner.kv_memory.block_bytes
    block_ids = [BlockId(block) for block in range(runner.kv_memory.num_blocks)]
    held = b"".join(map(bytes, runner.blocks.read(block_ids)))
    return [held[first : first + size] for first in range(0, len(held), size)]


def test_prompt_logprobs_are_computed_eagerly(folder: Path) -> None:
    with runner_on(FakeDevice(), folder) as runner:
        driver_of(runner).run(*drives(num_tokens=2, prompt_logprobs=1))
        assert runner.graphs is not None
        causes = set(runner.num_passes)

    assert EagerCause.ALL_TOKENS in causes


def test_a_replay_reports_all_layers_with_a_fence_behind_it(folder: Path) -> None:
    class TakesFences:
        def __init__(self) -> None:
            self.layers: list[tuple[int, bool]] = []
            self.num_passes = 0

        def layer_done(self, layer: int, fence: Fence) -> None:
            self.layers.append((layer, fence.is_passed))

        def pass_done(self) -> None:
            self.num_passes += 1

    device = FakeDevice(costs=Costs(replay_s=1.0))
    with runner_on(device, folder) as runner:
        driver = driver_of(runner)
        driver.add(drives(lengths=(5,))[0])
        driver.step()
        runner.hook = hook = TakesFences()

        driver.step()

    assert device.counts.replays == 1
    assert hook.layers == [(0, False), (1, False)]
    assert hook.num_passes == 1


@pytest.mark.triton  # long, as the tests of Triton's kernels
def test_graphs_keep_the_angles_of_all_positions(tmp_path: Path) -> None:
    """A long prompt must not replace the table of angles that graphs read."""
    variant = replace(VARIANTS["llama"], settings={"max_position_embeddings": 2048})
    own, device = make_model_folder(tmp_path, variant), FakeDevice()
    requests = drives(2, (3, 1100))
    with runner_on(device, own, max_num_seqs=1, max_model_len=1200) as runner:
        driver = driver_of(runner)

        outputs = [driver.run(request) for request in requests]

    assert device.counts.replays == 2
    assert all(len(tokens) == 2 for [tokens] in outputs)


def replay(graphs: DecodeGraphs[T], size: GraphSize, batch: DecodeBatch) -> T:
    launch = graphs.prepare(size, batch)
    graphs.inputs.send()
    return launch()


def graphs_of(device: FakeDevice, prepare: Prepare[T], *sizes: GraphSize) -> DecodeGraphs[T]:
    pool = device.make_graph_pool()
    assert pool is not None
    graphs = DecodeGraphs(device, pool, prepare, scratch_block=0)
    graphs.capture(sizes, NOTHING)
    return graphs


def test_inputs_have_room_for_all_graphs_before_the_first_is_captured() -> None:
    def prepare(batch: DecodeBatch, inputs: StepInputs) -> Callable[[], Tensor]:
        token_ids, tables = inputs.put(batch.token_ids), inputs.put(batch.layout.block_tables)
        return lambda: token_ids + tables[0, :, -1]

    sizes = GraphSize(64, 4096), GraphSize(2, 3)  # of 2 MiB and 64 bytes
    layout = empty_layout(1).pad(2, 3, 5)
    with FakeDevice() as device:
        graphs = graphs_of(device, prepare, *sizes)

        found = [
            replay(graphs, size, DecodeBatch(np.array([7, 8]), layout, None))[:2].tolist()
            for size in sizes
        ]

    assert found == [[7, 8], [12, 13]]  # of table entries: padding of the width, and the last one


def test_a_graph_that_reads_freed_memory_is_detected() -> None:
    def prepare(batch: DecodeBatch, inputs: StepInputs) -> Callable[[], Tensor]:
        moved = inputs.put(batch.token_ids).clone()  # of this step alone
        return partial(torch.add, moved, 1)

    with FakeDevice() as device:
        graphs = graphs_of(device, prepare, GraphSize(2, 1))

        with pytest.raises(RuntimeError, match="freed after its capture"):
            replay(graphs, GraphSize(2, 1), NOTHING)


def test_a_capture_must_not_wait_for_the_device() -> None:
    def prepare(batch: DecodeBatch, inputs: StepInputs) -> Callable[[], Tensor]:
        tokens = inputs.put(batch.token_ids)
        return lambda: tokens + int(tokens.sum())

    with (
        FakeDevice() as device,
        pytest.raises(RuntimeError, match="not permitted while a graph is captured"),
    ):
        graphs_of(device, prepare, GraphSize(2, 1))


def test_inputs_of_another_size_than_the_graph_reads_are_refused() -> None:
    sizes = iter((8, 8, 9))

    def prepare(batch: DecodeBatch, inputs: StepInputs) -> Callable[[], Tensor]:
        token_ids = inputs.put(np.zeros(8 * next(sizes)))
        return lambda: token_ids + 1

    with FakeDevice() as device:
        graphs = graphs_of(device, prepare, GraphSize(2, 1))

        with pytest.raises(RuntimeError, match=r"inputs of 576 bytes .* reads 512"):
            replay(graphs, GraphSize(2, 1), NOTHING)


@pytest.mark.parametrize(
    ("spare_bytes", "lacking"), [(16 << 10, "the first steps"), (512 << 10, "graphs")]
)
def test_a_device_without_memory_is_named(folder: Path, spare_bytes: int, lacking: str) -> None:
    with runner_on(FakeDevice(), folder, enforce_eager=True) as runner:
        used = runner.device.free_bytes()
    device = FakeDevice(memory_bytes=(1 << 30) - used + spare_bytes)

    with (
        pytest.raises(InvalidConfig, match=f"no memory for {lacking}.*lower --kv-cache-memory"),
        runner_on(device, folder),
    ):
        pass


@pytest.mark.parametrize("parts", [TORCH, GRAPHABLE])
def test_graphs_need_kernels_with_static_launches(folder: Path, parts: Parts) -> None:
    with runner_on(FakeDevice(), folder, parts) as runner:
        has_graphs = runner.graphs is not None

    assert has_graphs is parts.has_static_launches


def test_a_mixture_whose_experts_wait_for_the_cpu_is_computed_without_graphs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    own = make_model_folder(tmp_path, FAMILY_VARIANTS["qwen3-moe"])
    with runner_on(FakeDevice(), own) as runner:
        has_graphs = runner.graphs is not None

    assert not has_graphs
    assert "without graphs: the CPU reads which experts are chosen" in caplog.text


def test_after_a_failed_capture_steps_are_launched_without_graphs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The torch reference reads which experts are chosen, whatever these parts claim."""
    own = make_model_folder(tmp_path, FAMILY_VARIANTS["qwen3-moe"])
    parts = replace(GRAPHABLE, waits_for_experts=lambda moe: False)
    with runner_on(FakeDevice(), own, parts) as runner:
        has_graphs = runner.graphs is not None
        outputs = driver_of(runner).run(*drives(2))

    assert not has_graphs
    assert "capture failed: synchronisation not permitted" in caplog.text
    assert outputs == outputs_on_the_cpu(own, 2)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "memory_bytes", "parts"),
    [
        ("folder", 3_400_000, TORCH),
        ("recurrent_folder", 5_200_000, TORCH),
        ("folder", 18_300_000, GRAPHABLE),
    ],
)
def test_the_kv_cache_gets_what_weights_graphs_and_the_largest_step_leave(
    model: str,
    memory_bytes: int,
    parts: Parts,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = request.getfixturevalue(model)
    settings = {"kv_cache_bytes": None, "max_num_seqs": 16, "max_num_batched_tokens": 96}
    needed: list[int] = []
    device = FakeDevice(memory_bytes=memory_bytes)
    caplog.set_level("INFO")

    with runner_on(device, path, parts, gpu_memory_utilization=0.8, **settings) as runner:
        kv_bytes = runner.kv_memory.num_blocks * runner.kv_memory.block_bytes
        others = memory_bytes - device.free_bytes() - kv_bytes  # weights and graphs
        driver = driver_of(runner)

        def serve() -> None:
            for number in range(16):
                driver.add(Drive(RequestId(f"r{number}"), prompt_of(6), num_tokens=2))
            driver.step()

        profile = device.profile(serve)
        needed.append(profile.run_bytes if profile is not None else 0)

    memory = runner.kv_memory
    assert memory.num_blocks < 16 * memory.layout.num_blocks(128 // BLOCK_SIZE)  # a full batch
    assert others + kv_bytes + needed[0] <= 0.8 * memory_bytes
    assert "largest step and graphs" in caplog.text


def test_the_kv_cache_leaves_room_for_adapters(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"kv_cache_bytes": None, "max_num_seqs": 16, "max_num_batched_tokens": 96}
    caplog.set_level("INFO")
    num_blocks = []
    for adapters in ({}, {"max_loras": 1, "max_cpu_loras": 3, "max_lora_rank": 8}):
        device = FakeDevice(memory_bytes=3_400_000)
        with runner_on(device, folder, TORCH, **settings, **adapters) as runner:
            num_blocks.append(runner.kv_memory.num_blocks)
            table, block_bytes = runner.adapters, runner.kv_memory.block_bytes

    assert table is not None
    assert num_blocks[0] - num_blocks[1] in (
        table.max_bytes // block_bytes,
        -(-table.max_bytes // block_bytes),
    )
    assert table.max_bytes > block_bytes
    assert f"LoRA adapters take up to {format_bytes(table.max_bytes)}" in caplog.text


def test_a_largest_step_that_does_not_fit_is_refused(folder: Path) -> None:
    settings = {"kv_cache_bytes": None, "max_num_seqs": 64, "max_num_batched_tokens": 4096}

    with (
        pytest.raises(InvalidConfig, match="no memory for a step of 4096 tokens and 64 requests"),
        runner_on(FakeDevice(memory_bytes=3 << 20), folder, TORCH, **settings),
    ):
        pass


def bytes_of_prompt(device: FakeDevice, runner: TorchRunner, length: int) -> int:
    """Return the memory that the pass of a prompt takes."""
    driver = driver_of(runner)
    drive = Drive(RequestId("measured"), prompt_of(length), num_tokens=1)

    def run() -> None:
        driver.run(drive)

    memory = device.profile(run)
    assert memory is not None
    return memory.run_bytes


def test_a_pass_without_memory_fails_alone(folder: Path) -> None:
    device = FakeDevice()
    with runner_on(device, folder, TORCH, max_num_seqs=4) as runner:
        config = SchedulerConfig(max_num_seqs=4, max_model_len=128)
        cache = CacheConfig(runner.kv_memory.num_blocks, BLOCK_SIZE)
        engine = EngineCore(Scheduler(config, cache), runner)
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        for name, length in (("short", 5), ("long", 100)):
            engine.scheduler.add(
                EngineRequest(RequestId(name), prompt_of(length), sampling, seed=0)
            )
        needed = [bytes_of_prompt(device, runner, length) for length in (5, 105)]
        used = device.memory_bytes - device.free_bytes()
        device.memory_bytes = used + (needed[0] + needed[1]) // 2
        found: dict[str, list[Output]] = {"short": [], "long": []}
        while engine.scheduler.has_work:
            for output in engine.step():
                found[output.request_id].append(output)

    failure = found["long"][-1].failure
    assert failure is not None
    assert "OutOfMemoryError" in failure.reason
    assert len(found["short"]) == 3
