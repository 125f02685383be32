"""Completion fences of the KV hook: no KV leaves a device before it is written.

The device of these tests computes asynchronously. Launched work completes in order, and only when
a fence is waited for or the test advances the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
import torch

from baton.core.ids import BlockId, HandoffId, RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import Plan, PlanRow
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.device.cuda import CudaFence
from baton.engine.runner.device.device import Device
from baton.engine.runner.load import load_runner
from baton.engine.runner.model_info import KvMemory
from baton.engine.runner.model_runner import TorchRunner
from baton.kv_transfer.fence import PASSED, Fence
from baton.kv_transfer.protocol.digest import BlockDigest, hash_region
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.types import KvOrders
from baton.kv_transfer.worker import KvTransferWorker
from tests.support.fake_runner import run_plan
from tests.support.handoff_world import CONFIG, FINGERPRINT, BrokenPromise, Node, World
from tests.support.lagging_memory import BLOCK_BYTES, LaggingMemory
from tests.support.models import prompt_of
from tests.support.staged_memory import StagedMemory

ID = HandoffId("r", 0)
ROOM = replace(CONFIG, sender=replace(CONFIG.sender, max_in_flight_bytes=64 * BLOCK_BYTES))


class FencelessWorker(KvTransferWorker):
    """KV worker that ignores fences: it treats launched work as completed."""

    def layer_done(self, layer: int, now: float, fence: Fence = PASSED) -> None:
        super().layer_done(layer, now)


def in_a_pass(
    num_blocks: int = 2,
    *,
    waits_at_pass_end: bool = True,
    worker: type[KvTransferWorker] = KvTransferWorker,
    verify: bool = False,
) -> tuple[World, Node, LaggingMemory]:
    """Return a world with a granted prompt that the pass just begun computes."""
    world = World(
        config=replace(ROOM, verify=verify),
        lags=True,
        waits_at_pass_end=waits_at_pass_end,
        worker=worker,
    )
    world.receive(ID, "p0", 0, num_blocks)
    world.begin(ID, "p0", num_blocks)
    world.exchange()
    node = world.ps["p0"]
    world.begin_pass(node, {ID: num_blocks})
    node.memory.drain()
    assert isinstance(node.memory, LaggingMemory)
    return world, node, node.memory


# --- KV worker ----------------------------------------------------------------------------------


def test_a_layer_is_sent_after_its_fence_has_passed_not_at_launch() -> None:
    world, node, memory = in_a_pass()

    world.end_layer(node)
    posted_at_launch = len(world.wire.flights)
    world.turn(node)
    posted_while_it_computes = len(world.wire.flights)
    memory.catch_up()
    world.turn(node)

    assert (posted_at_launch, posted_while_it_computes) == (0, 0)
    assert len(world.wire.flights) == 1


@pytest.mark.parametrize("waits_at_pass_end", [True, False])
def test_landed_kv_equals_the_computed_kv(waits_at_pass_end: bool) -> None:
    world, node, _ = in_a_pass(waits_at_pass_end=waits_at_pass_end)

    world.end_pass(node)
    world.complete(ID)
    world.settle()

    assert world.landed == {ID}  # the world compares every byte
    world.check_all_free()


def test_layers_are_sent_at_the_end_of_a_pass_once_their_fences_have_passed() -> None:
    world, node, memory = in_a_pass()
    for _ in range(FINGERPRINT.layout.num_layers):
        world.end_layer(node)
    assert not world.wire.flights

    node.worker.pass_done(world.now)

    assert len(world.wire.flights) == FINGERPRINT.layout.num_layers
    assert memory.fence().is_passed


def test_a_pass_without_layers_to_send_waits_for_no_fence() -> None:
    world = World(lags=True)
    node = world.ps["p0"]
    assert isinstance(node.memory, LaggingMemory)
    node.memory.put(BlockId(0), b"kernels!")

    node.worker.layer_done(0, world.now, node.memory.fence())
    node.worker.pass_done(world.now)

    assert not node.memory.fence().is_passed


def test_no_block_is_granted_while_a_pass_may_still_write_it() -> None:
    """The blocks of an aborted request are free before the device has finished its writes."""
    world = World(lags=True)
    node = world.ps["p0"]
    assert isinstance(node.memory, LaggingMemory)
    node.memory.put(BlockId(0), b"too late")
    node.worker.layer_done(0, world.now, node.memory.fence())

    node.worker.start(KvOrders(), world.now)

    assert node.memory.fence().is_passed


def test_a_worker_that_ignores_fences_is_detected() -> None:
    world, node, _ = in_a_pass(worker=FencelessWorker)

    world.end_layer(node)
    world.wire.deliver_all()  # quickly: the device has not completed its work
    world.end_pass(node)
    world.complete(ID)
    with pytest.raises(BrokenPromise, match="landed with"):
        world.settle()


def test_digests_detect_bytes_sent_before_their_fence() -> None:
    world, node, _ = in_a_pass(worker=FencelessWorker, verify=True)

    world.end_layer(node)
    world.wire.deliver_all()
    world.end_pass(node)
    world.complete(ID)
    world.settle()

    assert world.landed == set()
    assert world.d.worker.counters().num_digest_mismatches == 1


def test_blocks_are_released_after_their_copy_if_the_link_is_cut_during_it() -> None:
    world = World(config=ROOM, stages=True)
    memory = world.d.memory
    assert isinstance(memory, StagedMemory)
    world.receive(ID, "p0", 0, 2)
    world.begin(ID, "p0", 2)
    world.complete(ID)
    while not memory.is_copying:
        for each in world.staged_memories:
            each.land_copies()
        for node in world.nodes:
            node.link.pass_all()
            world.turn(node)
        world.wire.deliver_all()
    assert ID not in world.landed | world.ended

    world.hub.cut(world.hub.link_ids[-1])
    world.d.link.pass_all()
    world.turn(world.d)

    assert ID in world.ended - world.landed
    assert not memory.is_copying


# --- the runner -----------------------------------------------------------------------------------


@dataclass(slots=True)
class SnapshotFence:
    """Fence that records which layers of a block were launched before it."""

    written: list[bool]
    events: list[str]
    is_passed: bool = False

    def wait(self) -> None:
        self.events.append(f"wait for {sum(self.written)} layers")
        self.is_passed = True


class SnapshotDevice(Device):
    """CPU whose fences are not passed when they are recorded."""

    def __init__(self, runner: TorchRunner, block: int) -> None:
        self._runner = runner
        self._block = BlockId(block)
        self.events: list[str] = []

    def record(self) -> Fence:
        self.events.append("fence")
        return SnapshotFence(layers_written(self._runner, self._block), self.events)

    def drain(self) -> None:
        self.events.append("drain")


def layers_written(runner: TorchRunner, block: BlockId) -> list[bool]:
    held = b"".join(runner.blocks.read([block]))
    size = runner.kv_memory.blocks.layer_bytes
    return [any(held[start : start + size]) for start in range(0, len(held), size)]


class TakesFences:
    def __init__(self) -> None:
        self.fences: list[tuple[int, list[bool]]] = []

    def layer_done(self, layer: int, fence: Fence) -> None:
        assert isinstance(fence, SnapshotFence)
        self.fences.append((layer, fence.written))

    def pass_done(self) -> None:
        """Do nothing: the pass waits for no transfer."""


def a_plan(prompt: Sequence[int], block: int, num_tokens: int) -> Plan:
    name = RequestId("r")
    started = PlanRow(
        name, tuple(prompt), len(prompt), 0, ((BlockId(block),),), SamplingParams(), 0
    )
    return Plan(started=(started,), num_scheduled_tokens={name: num_tokens})


@pytest.mark.parametrize("num_tokens", [8, 16])
def test_each_layer_has_a_fence_after_its_kv_and_a_pass_waits_for_the_last_one(
    folder: Path, num_tokens: int
) -> None:
    """This includes a chunk in the middle of a prompt, for which no sampled token is waited for."""
    with load_runner(RunnerConfig(str(folder), kv_cache_bytes=1 << 20)) as runner:
        runner.hook = hook = TakesFences()
        runner.device = device = SnapshotDevice(runner, block=3)

        run_plan(runner, a_plan(prompt_of(16), 3, num_tokens))
        run_plan(runner, Plan(dropped=(RequestId("r"),)))

        assert hook.fences == [(0, [True, False]), (1, [True, True])]
        assert device.events == ["fence"] * 3 + ["wait for 2 layers", "drain"]


def test_a_copy_of_the_blocks_has_the_digest_of_the_blocks(folder: Path) -> None:
    config = RunnerConfig(str(folder), kv_cache_bytes=2 << 20, dtype="bfloat16")
    block_ids = [BlockId(block) for block in (40, 3, 4, 5, *range(10, 39))]
    with load_runner(config) as runner:
        run_plan(runner, a_plan(prompt_of(16), 3, 16))
        here, copied = (
            BlockDigest(each)
            for each in (hash_region(region_of(runner.kv_memory)), runner.blocks.hash)
        )

        here.add(block_ids)
        copied.add(block_ids)

        assert here.value() == copied.value()


def region_of(memory: KvMemory) -> Region:
    return Region(memory.address, memory.num_blocks, memory.block_bytes, memory.device)


class CudaEvent:
    """Fake of the parts of torch.cuda.Event that the runner uses."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


def test_a_cuda_fence_queries_and_synchronizes_its_event() -> None:
    event = CudaEvent()
    fence = CudaFence(cast("torch.cuda.Event", event))

    before = fence.is_passed
    fence.wait()

    assert (before, fence.is_passed) == (False, True)
    assert Device().record() is PASSED
