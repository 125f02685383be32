"""Hand-offs between a simulated device and the CPU, over NIXL and through pinned host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.kernels.choose import TORCH, Parts
from baton.engine.runner.load import load_runner
from baton.engine.runner.model_runner import TorchRunner
from baton.node.kv.worker import NoteStaged
from baton.telemetry.metrics.instruments import NodeMetrics
from tests.support.device_engines import GREEDY, answers, engine_of
from tests.support.device_runners import GRAPHABLE, RunnerOnThreads, config_of
from tests.support.fake_device import Costs, FakeDevice
from tests.support.families import SHALLOW_STATE_VARIANTS
from tests.support.local_handoffs import LocalHandoffs
from tests.support.models import VARIANTS, make_model_folder, prompt_of
from tests.support.triton_parts import interpreted_parts, kernels_on, require_triton

CHUNK, NUM_TOKENS = 24, 4
LENGTHS = (1, 16, 100)
STAGING_BYTES = 1 << 20
STEP_S = 1e-5  # of simulated time, in which a block is copied or 10 operations are launched
SENT, RECEIVED = "device meta to cpu", "device cpu to meta"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("llama"), VARIANTS["llama"])


@dataclass(frozen=True, slots=True)
class Side:
    """Place of a runner and its settings."""

    place: str
    settings: dict[str, Any]


def sides(prefill: str, decode: str, **of_decode: Any) -> tuple[Side, Side]:
    return Side(prefill, {}), Side(decode, of_decode)


@contextmanager
def pair(
    folder: Path,
    *both: Side,
    parts: Parts = GRAPHABLE,
    dtype: str = "auto",
    note_staged: NoteStaged | None = None,
    async_scheduling: bool = False,
    on_threads: list[RunnerOnThreads] | None = None,
) -> Iterator[LocalHandoffs]:
    """Yield a prefill and a decode engine. Those on a GPU share a simulated one.

    Their runners are added to `on_threads`.
    """
    device = FakeDevice(costs=Costs(copy_s=STEP_S, block_copy_s=STEP_S))

    def load(side: Side) -> TorchRunner:
        config = RunnerConfig(
            str(folder),
            dtype=dtype,
            kv_cache_bytes=1 << 20,
            max_model_len=128,
            max_num_seqs=4,
            **side.settings,
        )
        if side.place == "cpu":
            return load_runner(config)
        runner = load_runner(
            config, make_device=lambda _: device, make_parts=lambda *_, **__: parts
        )
        wrapped = RunnerOnThreads(runner.launch, device)
        runner.launch = wrapped.launch  # type: ignore[method-assign]
        if on_threads is not None:
            on_threads.append(wrapped)
        return runner

    with device, ExitStack() as stack:
        if parts.make_block_hashes is not TORCH.make_block_hashes:
            stack.enter_context(kernels_on(device))
        prefill, decode = (stack.enter_context(load(side)) for side in both)
        engines = LocalHandoffs(
            prefill,
            [decode],
            chunk=CHUNK,
            staging_bytes=STAGING_BYTES,
            wait=lambda: device.advance(STEP_S),
            note_staged=note_staged,
            clock=lambda: device.now_s,
            async_scheduling=async_scheduling,
        )
        yield stack.enter_context(engines)


def tokens_of(engines: LocalHandoffs, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Return the tokens of prompts whose KV comes from the prefill engine."""
    tokens = []
    for length in lengths:
        answer = engines.answer(prompt_of(length, seed=length), NUM_TOKENS)
        assert answer.num_received == length
        tokens.append(answer.token_ids)
    return tokens


@pytest.fixture(scope="module")
def tokens_on_the_cpu(folder: Path) -> Callable[..., list[list[int]]]:
    @cache
    def compute(dtype: str = "auto", **settings: Any) -> list[list[int]]:
        with pair(folder, *sides("cpu", "cpu", **settings), dtype=dtype) as engines:
            return tokens_of(engines)

    return compute


@pytest.mark.parametrize(
    ("prefill", "decode", "async_scheduling"),
    [("gpu", "cpu", False), ("cpu", "gpu", False), ("gpu", "gpu", False), ("gpu", "gpu", True)],
)
def test_tokens_equal_those_of_the_cpu(
    folder: Path,
    tokens_on_the_cpu: Callable[..., list[list[int]]],
    prefill: str,
    decode: str,
    *,
    async_scheduling: bool,
) -> None:
    expected = tokens_on_the_cpu()

    with pair(folder, *sides(prefill, decode), async_scheduling=async_scheduling) as engines:
        found = tokens_of(engines)
        sent, received = (
            {each.conversion for each in engine.take_records()}
            for engine in (engines.prefill, engines.decodes[0])
        )

    assert found == expected
    assert sent == {SENT if prefill == "gpu" else ""}
    assert received == {RECEIVED if decode == "gpu" else ""}


@pytest.mark.parametrize("name", SHALLOW_STATE_VARIANTS)
def test_recurrent_states_are_handed_over_with_passes_in_flight(name: str, tmp_path: Path) -> None:
    own = make_model_folder(tmp_path, SHALLOW_STATE_VARIANTS[name])
    alone = [
        EngineRequest(
            RequestId(str(length)),
            prompt_of(length, seed=length),
            replace(GREEDY, max_tokens=NUM_TOKENS),
            seed=0,
        )
        for length in LENGTHS[1:]
    ]
    with load_runner(config_of(own)) as runner:
        cache = CacheConfig(32, 16, runner.kv_memory.layout)
        found_alone = answers(engine_of(runner, cache, async_scheduling=False), alone)

    runners: list[RunnerOnThreads] = []
    both = sides("gpu", "gpu")
    with pair(own, *both, parts=TORCH, async_scheduling=True, on_threads=runners) as engines:
        found = tokens_of(engines, LENGTHS[1:])

    assert found == [
        [token_id for output in outputs for token_id in output.token_ids]
        for outputs in (found_alone[request.request_id] for request in alone)
    ]
    num_followed = [sum(runner.follows) for runner in runners]
    assert num_followed[0] >= 4  # by chunks of the second prompt
    assert num_followed[1] >= 2  # by decodes of each


@pytest.mark.parametrize(("prefill", "decode"), [("gpu", "cpu"), ("cpu", "gpu")])
@pytest.mark.parametrize(
    ("settings", "conversion"),
    [
        ({"block_size": 32}, "block_size 16 to 32"),
        ({"kv_cache_dtype": "int8"}, "dtype bfloat16 to int8/bfloat16"),
    ],
    ids=["block size", "int8"],
)
def test_tokens_of_unlike_pairs_equal_those_of_unlike_pairs_on_the_cpu(
    folder: Path,
    tokens_on_the_cpu: Callable[..., list[list[int]]],
    prefill: str,
    decode: str,
    settings: dict[str, Any],
    conversion: str,
) -> None:
    expected = tokens_on_the_cpu(dtype="bfloat16", **settings)

    both = sides(prefill, decode, **settings)
    with pair(folder, *both, parts=TORCH, dtype="bfloat16") as engines:
        found = tokens_of(engines)
        received = {each.conversion for each in engines.decodes[0].take_records()}

    assert found == expected
    assert received == {f"{RECEIVED}, {conversion}" if decode == "gpu" else conversion}


def test_layers_are_sent_while_a_device_computes(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), pair(folder, *sides("gpu", "cpu")) as engines:
        # The first hand-off connects UCX's endpoints, which takes as long as the system lets it.
        tokens_of(engines, (1, 100))

        _, record = engines.prefill.take_records()

    assert record.overlap > 0
    assert "pinned host memory: UCX has no CUDA, so nixl cannot" in caplog.text


@pytest.mark.parametrize("place", ["gpu", "cpu"])
def test_staged_bytes_and_the_time_of_their_copies_are_counted(folder: Path, place: str) -> None:
    metrics = NodeMetrics("any")
    with pair(folder, *sides(place, place), note_staged=metrics.note_staged) as engines:
        tokens_of(engines, (100,))
        [record] = engines.prefill.take_records()
    value = metrics.registry.get_sample_value

    for direction in ("sent", "received"):
        labels = {"direction": direction}
        num_bytes = value("baton_kv_staged_bytes_total", labels)
        seconds = value("baton_kv_staged_copy_seconds_sum", labels) or 0.0
        if place == "gpu":
            assert num_bytes == record.num_bytes > 0
            assert seconds == pytest.approx(STEP_S) or seconds > STEP_S  # neighbours: one copy
        else:
            assert (num_bytes, seconds) == (0.0, 0.0)


@pytest.mark.triton
@pytest.mark.parametrize(("prefill", "decode"), [("gpu", "cpu"), ("cpu", "gpu")])
def test_tokens_of_blocks_that_are_hashed_on_the_device_equal_those_of_the_cpu(
    folder: Path, tokens_on_the_cpu: Callable[..., list[list[int]]], prefill: str, decode: str
) -> None:
    require_triton()
    expected = tokens_on_the_cpu()

    parts = replace(GRAPHABLE, make_block_hashes=interpreted_parts().make_block_hashes)
    with pair(folder, *sides(prefill, decode), parts=parts) as engines:
        found = tokens_of(engines, LENGTHS[:2])

    assert found == expected[:2]
