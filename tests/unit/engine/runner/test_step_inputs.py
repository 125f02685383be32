"""Inputs of a step: packed into one copy, and shared with the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from baton.engine.runner.device.device import Device
from baton.engine.runner.device.step_inputs import (
    ALIGNMENT,
    FIRST_BYTES,
    Array,
    PackedInputs,
    make_inputs,
)
from tests.support.fake_device import Costs, FakeDevice

ARRAYS: list[Array] = [
    np.arange(6, dtype=np.int64).reshape(2, 3),
    np.array([[True], [False], [True]]),
    np.zeros((0, 4), dtype=np.int64),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
    np.arange(3, dtype=np.float32),
]


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice(costs=Costs(copy_s=1.0)) as device:
        yield device


def test_arrays_are_copied_in_one_piece(device: FakeDevice) -> None:
    inputs = PackedInputs(device)

    inputs.begin()
    tensors = [inputs.put(array) for array in ARRAYS]
    inputs.send()

    assert [tuple(tensor.shape) for tensor in tensors] == [array.shape for array in ARRAYS]
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
    assert not device.counts.synchronizations
    assert len(device.counts.copies_in) == 1
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in ARRAYS]


def test_an_array_is_converted_as_it_is_packed(device: FakeDevice) -> None:
    array = np.arange(12).reshape(2, 6)[:, ::2]
    packed, shared = PackedInputs(device), make_inputs(Device())

    tensors = [inputs.put(array, np.int32) for inputs in (packed, shared)]
    packed.send()

    assert packed.num_packed_bytes == 32  # 24, aligned
    assert [tensor.dtype for tensor in tensors] == [torch.int32] * 2
    assert [tensor.tolist() for tensor in tensors] == [array.tolist()] * 2
    assert tensors[1].is_contiguous()


def test_a_step_is_packed_while_the_one_before_is_copied(device: FakeDevice) -> None:
    inputs = PackedInputs(device)
    seen = []
    for number in range(2):
        inputs.begin()
        tensor = inputs.put(np.array([number]))
        inputs.send()
        seen.append(tensor + 10)  # launched behind the copy

    in_flight = not device.is_idle
    waits = list(device.counts.synchronizations)

    assert in_flight
    assert not waits
    assert [tensor.tolist() for tensor in seen] == [[10], [11]]


def test_the_third_step_waits_for_the_copy_of_the_first(device: FakeDevice) -> None:
    inputs = PackedInputs(device)
    for number in range(2):
        inputs.begin()
        inputs.put(np.array([number]))
        inputs.send()

    inputs.begin()

    assert device.now_s == 1.0
    assert device.counts.synchronizations == ["runner/device/step_inputs.py:begin"]


def test_equal_shapes_have_the_same_memory_in_each_step(device: FakeDevice) -> None:
    inputs, addresses = PackedInputs(device), []
    for shift in range(3):
        inputs.begin()
        addresses.append([inputs.put(array).data_ptr() for array in ARRAYS])
        inputs.put(np.zeros(shift))
        inputs.send()

    assert addresses[0] == addresses[1] == addresses[2]


def test_arrays_that_were_not_sent_are_dropped_with_their_step(device: FakeDevice) -> None:
    inputs = PackedInputs(device)
    inputs.begin()
    inputs.put(np.zeros(100))

    inputs.begin()
    inputs.put(np.ones(2))

    assert inputs.num_packed_bytes == ALIGNMENT


def test_a_step_beyond_the_buffer_takes_more_copies_once(device: FakeDevice) -> None:
    inputs = PackedInputs(device)
    large = np.arange(FIRST_BYTES // 16)  # half of the buffer
    num_copies = []
    for _ in range(2):
        before = len(device.counts.copies_in)
        inputs.begin()
        tensors = [inputs.put(large + shift) for shift in range(5)]
        inputs.send()
        num_copies.append(len(device.counts.copies_in) - before)
        assert [int(tensor[-1]) for tensor in tensors] == [len(large) - 1 + i for i in range(5)]

    assert num_copies == [3, 1]


def test_fixed_arrays_stay_at_their_place_when_others_take_a_copy_apart(
    device: FakeDevice,
) -> None:
    inputs = PackedInputs(device)
    inputs.begin()
    inputs.put(ARRAYS[0])
    inputs.fix()
    small, large = np.arange(8), np.arange(FIRST_BYTES // 4)
    places, found, num_copies = [], [], []
    for more in (small, large, large):
        before = len(device.counts.copies_in)
        inputs.begin()
        tensors = [inputs.put(array) for array in (ARRAYS[0], more)]
        inputs.send()
        num_copies.append(len(device.counts.copies_in) - before)
        places.append(tensors[0].data_ptr())
        found.append([int(tensor.sum()) for tensor in tensors])

    assert len(set(places)) == 1
    assert num_copies == [1, 2, 2]
    assert found == [[15, int(more.sum())] for more in (small, large, large)]


def test_arrays_on_the_cpu_are_not_copied() -> None:
    inputs, array = make_inputs(Device()), np.arange(4)

    inputs.begin()
    tensor = inputs.put(array)
    inputs.send()
    array[0] = 7

    assert tensor.tolist() == [7, 1, 2, 3]
