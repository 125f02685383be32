"""Engines whose KV cache is in memory of a simulated device, with tiers below it.

Blocks come back from the tiers, and the tokens are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest

from baton.core.ids import RequestId
from baton.core.legs import LegKind
from baton.core.output import Output
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine, build_scheduler
from baton.engine.kv_arrival.arrivals import KvSources
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.kernels.choose import TORCH
from baton.engine.runner.load import load_runner
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.scheduler.config import SchedulerConfig
from baton.kv_transfer.external_kv import FILE, HOST
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from baton.node.kv.connectors import make_connector, tiers_in
from baton.node.kv.tiers_config import TiersConfig
from baton.node.options import NodeOptions
from baton.node.wiring import identify
from tests.support.fake_device import Costs, FakeDevice
from tests.support.models import prompt_of

pytestmark = pytest.mark.usefixtures("one_thread")

WAIT_S = 30.0
BLOCK_SIZE = 16
NUM_BLOCKS = 5  # of the KV cache: one prompt, and a part of another
PROMPTS = [prompt_of(2 * BLOCK_SIZE + 3, seed=seed) for seed in range(3)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
# A copy of a block takes longer than a pass, or a pass longer than all copies.
SLOW_COPIES, FAST_COPIES = Costs(block_copy_s=1.0), Costs(block_copy_s=1e-9)


@dataclass
class TierNode:
    engine: EngineCore
    tiers: TieredKv
    woken: Event
    num_requests: int = 0

    def run(self, prompt: tuple[int, ...]) -> Output:
        """Serve a request. Returns its last output, with all of its tokens."""
        self.num_requests += 1
        name = RequestId(f"r{self.num_requests}")
        self.engine.scheduler.add(EngineRequest(name, prompt, SAMPLING, seed=0))
        token_ids: list[int] = []
        while True:
            for output in self.engine.step():
                token_ids += output.token_ids
                if output.finish_reason is not None:
                    return output._replace(token_ids=tuple(token_ids))
            self._wait_if_idle()

    def store_all(self, num_blocks: int) -> None:
        """Step until so many blocks are in host memory."""
        while self.tiers.status()[0].num_blocks < num_blocks:
            self.engine.step()
            self._wait_if_idle()

    def _wait_if_idle(self) -> None:
        if self.engine.max_idle_s() is None:
            assert self.woken.wait(WAIT_S), "nothing was reported"
            self.woken.clear()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt on a CPU without tiers."""
    with load_runner(config_of(folder)) as runner:
        node = TierNode(build_engine(runner, options()), None, Event())  # type: ignore[arg-type]
        return [node.run(prompt).token_ids for prompt in PROMPTS]


def config_of(folder: Path, num_blocks: int = 100) -> RunnerConfig:
    block_bytes = 2 * 2 * 2 * BLOCK_SIZE * 16 * 4
    return RunnerConfig(
        str(folder),
        kv_cache_bytes=num_blocks * block_bytes,
        max_model_len=128,
        max_num_seqs=2,
        block_size=BLOCK_SIZE,
    )


def options() -> EngineOptions:
    return EngineOptions(SchedulerConfig(max_num_seqs=2))


@contextmanager
def cpu_node(model: Path, tiers: TiersConfig) -> Iterator[TierNode]:
    config = config_of(model, NUM_BLOCKS)
    with load_runner(config) as runner, _with_tiers(NodeOptions(config, tiers=tiers), runner) as it:
        yield it


@contextmanager
def device_node(model: Path, device: FakeDevice, tiers: TiersConfig) -> Iterator[TierNode]:
    config = config_of(model, NUM_BLOCKS)
    with (
        device,
        load_runner(
            config, make_device=lambda _: device, make_parts=lambda *_, **__: TORCH
        ) as runner,
        _with_tiers(NodeOptions(config, tiers=tiers), runner) as node,
    ):
        yield node


@contextmanager
def _with_tiers(given: NodeOptions, runner: TorchRunner) -> Iterator[TierNode]:
    woken = Event()
    identity = identify(given, LegKind.DECODE, runner)
    connector = make_connector(given, identity, runner, woken.set)
    tiers = tiers_in(connector)
    assert connector is not None
    assert tiers is not None
    with connector:
        scheduler = build_scheduler(runner, options(), KvSources(connector))
        yield TierNode(EngineCore(scheduler, runner, [connector]), tiers, woken)
    assert not connector.num_errors


@pytest.mark.parametrize(
    "costs",
    [
        pytest.param(SLOW_COPIES, id="slow copies"),
        pytest.param(FAST_COPIES, id="fast copies", marks=pytest.mark.triton),  # takes long
    ],
)
def test_evicted_blocks_come_back_from_host_memory_and_files_with_the_tokens_of_the_cpu(
    folder: Path, tmp_path: Path, costs: Costs, expected: list[tuple[int, ...]]
) -> None:
    tiers = TiersConfig(4 << 20, folder=str(tmp_path), folder_bytes=64 << 20)
    with device_node(folder, FakeDevice(costs=costs), tiers) as node:
        first = []
        for number, prompt in enumerate(PROMPTS):
            first.append(node.run(prompt).token_ids)
            node.store_all(2 * (number + 1))
        from_host = [node.run(prompt) for prompt in PROMPTS]
    with device_node(folder, FakeDevice(costs=costs), tiers) as node:
        from_files = [node.run(prompt) for prompt in PROMPTS]
    with cpu_node(folder, tiers) as node:
        on_cpu = [node.run(prompt) for prompt in PROMPTS]

    assert first == expected
    for tier, outputs in ((HOST, from_host), (FILE, from_files), (FILE, on_cpu)):
        assert [output.token_ids for output in outputs] == expected
        loaded = [output.served.loaded_tokens for output in outputs if output.served is not None]
        assert loaded == [{tier: 2 * BLOCK_SIZE}] * len(PROMPTS)
