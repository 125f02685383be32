"""Asynchronous devices: inputs, fences, graphs and copies. CUDA is tested where there is a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.core.ids import BlockId
from baton.engine.runner.device.block_copies import BlockCopies
from baton.engine.runner.device.cuda import CudaDevice
from baton.engine.runner.device.device import Device
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.device.step_inputs import PackedInputs
from baton.kv_transfer.tiers.kv_access import BlockMemory
from tests.support.fake_device import FakeDevice


def cuda_device() -> AbstractContextManager[Device]:
    return nullcontext(CudaDevice(torch.device("cuda:0")))


CUDA = pytest.param(
    cuda_device,
    id="cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ],
)


@pytest.fixture(params=[pytest.param(FakeDevice, id="fake"), CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    make = cast("Callable[[], AbstractContextManager[Device]]", request.param)
    with make() as device:
        yield device


def test_steps_in_flight_have_their_own_inputs(device: Device) -> None:
    inputs, sums = PackedInputs(device), []
    for step in range(5):
        inputs.begin()
        numbers = inputs.put(np.full((3, 50), step))
        is_odd = inputs.put(np.array([bool(step % 2)]))
        inputs.send()
        sums.append(numbers.sum() + is_odd)

    assert [int(total) for total in sums] == [0, 151, 300, 451, 600]


def test_a_fence_has_passed_after_a_wait_for_it_or_for_the_device(device: Device) -> None:
    torch.ones(1000, device=device.torch_device).sum()
    first = device.record()
    torch.ones(1000, device=device.torch_device).sum()
    second = device.record()

    first.wait()
    device.drain()

    assert (first.is_passed, second.is_passed) == (True, True)


def test_replays_compute_with_what_the_inputs_hold(device: Device) -> None:
    pool = device.make_graph_pool()
    assert pool is not None
    inputs = PackedInputs(device)
    weights = torch.arange(4.0, device=device.torch_device)
    outputs: list[Tensor] = []

    def put(first: float) -> Tensor:
        """Return the same memory each time."""
        inputs.begin()
        numbers = inputs.put(np.arange(first, first + 4, dtype=np.float32))
        inputs.send()
        return numbers

    def run() -> None:
        outputs[:] = [(numbers * weights).sum(dim=0, keepdim=True)]

    numbers = put(0.0)
    run()
    graph = pool.capture(run)
    found = []
    for first in (1.0, 5.0):
        put(first)
        graph.replay()
        found.append(outputs[0].clone())

    assert [float(each) for each in found] == [20.0, 44.0]


def test_memory_is_counted(device: Device) -> None:
    before = device.free_bytes()

    held = torch.zeros(64 << 20, dtype=torch.uint8, device=device.torch_device)

    assert before - device.free_bytes() >= held.numel()


# --- copies of blocks -----------------------------------------------------------------------------

NUM_BLOCKS, BLOCK_BYTES = 8, 96


@pytest.fixture
def copies(device: Device) -> Iterator[BlockCopies]:
    """Yield copies of blocks, each of which holds its number."""
    numbers = torch.arange(NUM_BLOCKS, dtype=torch.float32, device=device.torch_device)
    kv = numbers.view(-1, 1, 1).expand(-1, 2, BLOCK_BYTES // 8).contiguous()
    stream = device.make_copy_stream()
    assert stream is not None
    made = BlockCopies(kv, stream, device.record)
    yield made
    made.close()


@pytest.fixture
def host(copies: BlockCopies) -> BlockMemory:
    memory = huge_page_memory(NUM_BLOCKS * BLOCK_BYTES)
    copies.pin(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return BlockMemory(address, NUM_BLOCKS, BLOCK_BYTES)


def ids(*blocks: int) -> list[BlockId]:
    return list(map(BlockId, blocks))


def numbers_in(host: BlockMemory) -> list[float]:
    """Return the number in each block, all of whose numbers are equal."""
    blocks = [np.frombuffer(host.view(block), np.float32) for block in range(NUM_BLOCKS)]
    assert all((block == block[0]).all() for block in blocks)
    return [float(block[0]) for block in blocks]


def test_blocks_are_copied_out_and_in(copies: BlockCopies, host: BlockMemory) -> None:
    copies.record().wait()
    copies.copy_out(ids(5, 6, 7, 2), host, [1, 2, 3, 7]).wait()
    found = numbers_in(host)
    copies.copy_in(host, [7, 3, 1, 2], ids(0, 1, 2, 3))
    copies.copy_out(ids(0, 1, 2, 3), host, [4, 5, 6, 7]).wait()

    assert found == [0, 5, 6, 7, 0, 0, 0, 2]
    assert numbers_in(host) == [0, 5, 6, 7, 2, 7, 5, 6]


def test_no_copy_is_in_progress_after_a_drain(copies: BlockCopies, host: BlockMemory) -> None:
    copies.record().wait()
    copies.copy_out(ids(4), host, [0])

    copies.drain()

    assert numbers_in(host)[0] == 4


def test_memory_that_is_no_longer_pinned_can_be_pinned_again(copies: BlockCopies) -> None:
    memory = huge_page_memory(NUM_BLOCKS * BLOCK_BYTES)
    for _ in range(3):
        copies.pin(memory)
        copies.unpin(memory)


@pytest.mark.parametrize(("block", "slot"), [(-1, 0), (NUM_BLOCKS, 0), (0, -1), (0, NUM_BLOCKS)])
def test_blocks_outside_of_the_memory_are_not_copied(
    copies: BlockCopies, host: BlockMemory, block: int, slot: int
) -> None:
    with pytest.raises(IndexError, match="of 8"):
        copies.copy_out(ids(block), host, [slot])
    with pytest.raises(IndexError, match="of 8"):
        copies.copy_in(host, [slot], ids(block))


def test_neighbours_are_one_copy() -> None:
    with FakeDevice() as device:
        stream = device.make_copy_stream()
        kv = torch.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device=device.torch_device)
        copies = BlockCopies(kv, stream, device.record)
        memory = huge_page_memory(NUM_BLOCKS * BLOCK_BYTES)
        copies.pin(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        host = BlockMemory(address, NUM_BLOCKS, BLOCK_BYTES)

        copies.copy_out(ids(2, 3, 4, 0, 1), host, [5, 6, 7, 2, 4])

        assert stream.num_copies == 3
        copies.close()
        assert (stream.num_pinned, stream.is_idle) == (0, True)
