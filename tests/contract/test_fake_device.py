"""The simulated device of the tests: what it refuses, and what goes wrong with it as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.support.device_tensors import PLACE
from tests.support.fake_device import Costs, FakeDevice


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice(costs=Costs(launch_s=1.0, copy_s=1.0)) as device:
        yield device


def test_work_lands_in_order_as_time_passes(device: FakeDevice) -> None:
    first = torch.zeros(2, device=PLACE)
    second = first + 1
    before = device.read(second)

    device.advance(1.0)
    after_one = device.read(first).tolist(), device.read(second).isnan().all().item()
    device.advance(1.0)

    assert before.isnan().all()
    assert after_one == ([0.0, 0.0], True)
    assert device.read(second).tolist() == [1.0, 1.0]
    assert not device.counts.synchronizations


def test_a_fence_passes_when_the_work_before_it_has_landed(device: FakeDevice) -> None:
    torch.zeros(2, device=PLACE)
    fence = device.record()
    torch.zeros(2, device=PLACE)

    before = fence.is_passed
    fence.wait()

    assert (before, fence.is_passed, device.is_idle) == (False, True, False)
    assert device.now_s == 1.0


def test_memory_that_is_overwritten_before_it_was_copied_arrives_overwritten(
    device: FakeDevice,
) -> None:
    pinned = device.pin(4)
    buffer = torch.empty(4, dtype=torch.uint8, device=PLACE)

    pinned.fill_(1)
    buffer.copy_(pinned, non_blocking=True)
    pinned.fill_(2)

    assert buffer.tolist() == [2] * 4


def test_a_copy_to_the_host_that_is_not_waited_for_has_not_arrived(device: FakeDevice) -> None:
    numbers = torch.ones(2, device=PLACE)

    copy = torch.zeros(2)
    copy.copy_(numbers, non_blocking=True)
    before = copy.tolist()
    device.drain()

    assert before == [0.0, 0.0]
    assert copy.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("read", "num_waits"),
    [
        (lambda numbers: numbers.tolist(), 1),
        (lambda numbers: int(numbers[0]), 1),
        (lambda numbers: numbers.nonzero(), 1),  # whose shape depends on the numbers
        (lambda numbers: numbers[[0, 2]], 1),  # a copy of the index
        (lambda numbers: numbers.to(torch.float32).sum(), 0),
    ],
)
def test_reads_of_numbers_wait(
    device: FakeDevice, read: Callable[[Tensor], object], num_waits: int
) -> None:
    read(torch.arange(3, device=PLACE))

    assert len(device.counts.synchronizations) == num_waits


def test_the_cpu_cannot_reach_the_memory(device: FakeDevice) -> None:
    numbers = torch.arange(3, device=PLACE)

    with pytest.raises(RuntimeError):
        numbers.numpy()


def test_more_memory_than_there_is_is_refused_until_some_is_freed() -> None:
    with FakeDevice(memory_bytes=1000) as device:
        held = torch.empty(600, dtype=torch.uint8, device=PLACE)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(600, dtype=torch.uint8, device=PLACE)
        del held
        torch.empty(600, dtype=torch.uint8, device=PLACE)

        assert device.free_bytes() == 1000


def test_a_replay_repeats_its_launches_in_the_memory_of_its_capture(device: FakeDevice) -> None:
    pool = device.make_graph_pool()
    assert pool is not None
    numbers, total = torch.ones(2, device=PLACE), torch.zeros(2, device=PLACE)

    def add() -> None:
        total.add_(numbers)

    graph = pool.capture(add)
    captured = total.tolist()
    for _ in range(2):
        graph.replay()
    numbers.fill_(5.0)
    graph.replay()

    assert captured == [0.0, 0.0]
    assert total.tolist() == [7.0, 7.0]


def test_streams_of_copies_and_launches_do_not_wait_for_each_other() -> None:
    with FakeDevice(costs=Costs(launch_s=1.0, block_copy_s=0.1)) as device:
        stream, host = device.make_copy_stream(), torch.zeros(4, dtype=torch.uint8)
        numbers = torch.ones(4, dtype=torch.uint8, device=PLACE)
        with stream.pinned(host):
            stream.copy(host, numbers)
            stream.record().wait()
            before = host.tolist()
            device.drain()
            stream.copy(host, numbers)
            stream.record().wait()

    assert before != [1] * 4
    assert host.tolist() == [1] * 4


def test_a_copy_of_pageable_memory_in_a_stream_is_refused(device: FakeDevice) -> None:
    numbers = torch.ones(4, dtype=torch.uint8, device=PLACE)

    with pytest.raises(RuntimeError, match="pageable"):
        device.make_copy_stream().copy(torch.zeros(4, dtype=torch.uint8), numbers)
