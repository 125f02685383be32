"""Copies of KV through pinned host memory: noted once, with their bytes and times."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from baton.core.ids import BlockId
from baton.engine.runner.attention.kv_blocks import KvBlocks
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.kv_transfer.fence import PASSED
from baton.kv_transfer.layout import KvLayout, StagedRun
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.records import TransferRole
from baton.kv_transfer.transports.base import LayerRange
from baton.node.kv.worker import StagedCopies
from tests.support.fake_device import Costs, FakeDevice

NUM_BLOCKS, NUM_LAYERS, BLOCK_BYTES = 8, 2, 128
COPY_S = 1.0
LAYOUT = KvLayout("float32", 2, NUM_LAYERS, 1, 4)

Noted = tuple[TransferRole, int, float]


class World:
    """A KV cache on a device, pinned memory for as many blocks, and what was noted."""

    def __init__(self, device: FakeDevice) -> None:
        kv = torch.zeros((NUM_BLOCKS, NUM_LAYERS, 2, 1, 2, 4), device=device.torch_device)
        self.device, self.noted = device, list[Noted]()
        self.blocks = KvBlocks(kv, device)
        self.memory = huge_page_memory(NUM_BLOCKS * BLOCK_BYTES)
        self.blocks.pin(self.memory)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.region = Region(base, NUM_BLOCKS, BLOCK_BYTES)
        self.copies = StagedCopies(
            self.blocks, lambda *noted: self.noted.append(noted), lambda: device.now_s
        )

    def staged(self, num_blocks: int) -> StagedRun:
        """Return received blocks that the conversion copies to every second block."""
        targets = tuple(BlockId(2 * block) for block in range(num_blocks))
        return StagedRun(LAYOUT, LAYOUT, 0, num_blocks, 0, targets)


@pytest.fixture
def world() -> Iterator[World]:
    with FakeDevice(costs=Costs(block_copy_s=COPY_S)) as device:
        world = World(device)
        yield world
        world.blocks.close()


def ids(*blocks: int) -> list[BlockId]:
    return list(map(BlockId, blocks))


def test_layers_that_are_sent(world: World) -> None:
    copied = world.copies.copy_out(world.region, ids(1, 4), LayerRange(1, 2, NUM_LAYERS), ids(0, 1))

    seen = []
    for seconds in (COPY_S, 1.5 * COPY_S, COPY_S):
        world.device.advance(seconds)
        seen.append((copied.is_passed, len(world.noted)))
    copied.wait()

    assert seen == [(False, 0), (True, 1), (True, 1)]
    assert world.noted == [(TransferRole.SENT, 2 * BLOCK_BYTES // NUM_LAYERS, 2.5 * COPY_S)]


def test_blocks_that_are_received(world: World) -> None:
    copied = world.copies.convert(world.memory, world.staged(3))

    copied.wait()
    copied.wait()

    assert world.noted == [(TransferRole.RECEIVED, 3 * BLOCK_BYTES, 3 * COPY_S)]


def test_a_receive_without_blocks_is_no_copy(world: World) -> None:
    assert world.copies.convert(world.memory, world.staged(0)) is PASSED
    assert not world.noted
