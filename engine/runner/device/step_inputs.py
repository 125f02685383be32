"""Inputs of a step on the device: all of its arrays in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.runner.device.device import Device
from baton.kv_transfer.fence import PASSED, Fence

Array = npt.NDArray[Any]
ALIGNMENT = 16  # bytes: kernels are specialised for aligned arrays
FIRST_BYTES = 1 << 20  # of a buffer, before it has to grow


class StepInputs:
    """Arrays of a step. On the CPU, tensors share their memory.

    The parts of a model put their arrays before the step is launched, and take the tensors at once.
    """

    def begin(self) -> None:
        """Begin a step, without arrays of an earlier one that was not sent."""

    def put(self, array: Array, dtype: type[np.generic] | None = None) -> Tensor:
        """Return the array's tensor on the device, which has the array's numbers after `send`.

        They are converted to the dtype, which must be able to hold them. The tensor keeps them
        until the arrays of the next step are sent, in the order of launches.
        """
        return torch.from_numpy(array if dtype is None else array.astype(dtype, order="C"))

    def send(self) -> None:
        """Copy the arrays. Launches that read them come after it."""


SHARED_INPUTS = StepInputs()


class PackedInputs(StepInputs):
    """Inputs of another device, by one copy from a pinned buffer to one on the device.

    There are two pinned buffers, because the next step is packed while this one is copied. Equal
    shapes, put in the same order, have the same memory on the device in each step.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._apart: PackedInputs | None = None  # for what a fixed buffer has no room for
        self._num_packed = 0
        self._step_bytes = 0
        self._reserve(FIRST_BYTES)

    @property
    def num_packed_bytes(self) -> int:
        """Size of what was put since `begin`, unless it did not fit into the buffer."""
        return self._num_packed

    def begin(self) -> None:
        if self._step_bytes > len(self._buffer):
            self._reserve(2 * self._step_bytes)
        self._hosts[0].fence.wait()
        self._num_packed = self._step_bytes = 0
        if self._apart is not None:
            self._apart.begin()

    def fix(self) -> None:
        """Drop the step, and never move arrays of its size again: graphs read them.

        There is room for FIRST_BYTES more. Other arrays take a copy of their own.
        """
        self._reserve(self._step_bytes + FIRST_BYTES)
        self._num_packed = self._step_bytes = 0
        self._apart = PackedInputs(self._device)

    def put(self, array: Array, dtype: type[np.generic] | None = None) -> Tensor:
        own_dtype = array.dtype if dtype is None else np.dtype(dtype)
        num_bytes = array.size * own_dtype.itemsize
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if self._num_packed + size > len(self._buffer):
            if self._apart is not None:
                return self._apart.put(array, dtype)
            self._overflow(size)
        start = self._num_packed
        self._num_packed += size
        self._step_bytes += size
        part = self._hosts[0].numbers[start : start + num_bytes].view(own_dtype)
        part.reshape(array.shape)[...] = array
        kind = torch.from_numpy(part[:0]).dtype
        return self._buffer[start : start + num_bytes].view(kind).view(array.shape)

    def send(self) -> None:
        if self._apart is not None:
            self._apart.send()
        if not self._num_packed:
            return
        host, packed = self._hosts[0], slice(self._num_packed)
        self._buffer[packed].copy_(host.tensor[packed], non_blocking=True)
        host.fence = self._device.record()
        self._hosts.reverse()

    def _overflow(self, num_bytes: int) -> None:
        """Send what the buffer holds, and go on with another. Later steps have a larger one."""
        self.send()
        self._reserve(max(len(self._buffer), num_bytes))
        self._num_packed = 0

    def _reserve(self, num_bytes: int) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)
        pinned = [self._device.pin(num_bytes) for _ in range(2)]
        self._hosts = [_HostBuffer(tensor, tensor.numpy()) for tensor in pinned]


@dataclass(slots=True, eq=False)
class _HostBuffer:
    tensor: Tensor
    numbers: npt.NDArray[np.uint8]  # the same memory
    fence: Fence = PASSED  # after the copy out of it


def make_inputs(device: Device) -> StepInputs:
    return SHARED_INPUTS if device.shares_host_memory else PackedInputs(device)
