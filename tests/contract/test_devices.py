"""Asynchronous devices: inputs, fences and graphs. CUDA is tested where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.runner.device.cuda import CudaDevice
from baton.engine.runner.device.device import Device
from baton.engine.runner.device.step_inputs import PackedInputs
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
    torch.ones(1000, device=device.place).sum()
    first = device.record()
    torch.ones(1000, device=device.place).sum()
    second = device.record()

    first.wait()
    device.drain()

    assert (first.is_passed, second.is_passed) == (True, True)


def test_replays_compute_with_what_the_inputs_hold(device: Device) -> None:
    pool = device.make_graph_pool()
    assert pool is not None
    inputs = PackedInputs(device)
    weights = torch.arange(4.0, device=device.place)
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

    held = torch.zeros(64 << 20, dtype=torch.uint8, device=device.place)

    assert before - device.free_bytes() >= held.numel()
