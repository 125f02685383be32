"""Results of a step: copied to the host in one piece, and read later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton.engine.runner.device.device import Device
from baton.engine.runner.device.step_inputs import Array
from baton.kv_transfer.fence import Fence


class Received(Protocol):
    """Results on their way to the host."""

    def read(self) -> list[Array]:
        """Wait for the results, and return them. They are valid as long as `send` says."""
        ...


class StepOutputs:
    """Takes results to the host. On the CPU, arrays share the memory of their tensors."""

    def send(self, tensors: Sequence[Tensor]) -> Received:
        """Start to copy results, which are valid until the step after the next one is sent."""
        return _SharedResults(tensors)


class _SharedResults(NamedTuple):
    tensors: Sequence[Tensor]

    def read(self) -> list[Array]:
        return [tensor.numpy() for tensor in self.tensors]


SHARED_OUTPUTS = StepOutputs()


class PackedOutputs(StepOutputs):
    """Outputs of another device, by one copy to a pinned buffer.

    There are two pinned buffers, because a step can be launched before the last one is read.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._packed = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
        self._hosts = [device.pin(0), device.pin(0)]

    def send(self, tensors: Sequence[Tensor]) -> Received:
        if not tensors:
            return _SharedResults(())
        # Larger numbers first, so that all are aligned.
        order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
        parts = [tensors[index].contiguous().flatten().view(torch.uint8) for index in order]
        packed = parts[0] if len(parts) == 1 else self._pack(parts)
        self._hosts.reverse()
        if len(packed) > len(self._hosts[0]):
            self._hosts[0] = self._device.pin(2 * len(packed))
        host = self._hosts[0][: len(packed)]
        host.copy_(packed, non_blocking=True)
        shapes = [_Shape(tensors[index].dtype, tensors[index].shape) for index in order]
        return _SentResults(host, order, shapes, self._device.record())

    def _pack(self, parts: Sequence[Tensor]) -> Tensor:
        num_bytes = sum(part.numel() for part in parts)
        if num_bytes > len(self._packed):
            self._packed = self._packed.new_empty(2 * num_bytes)
        return torch.cat(list(parts), out=self._packed[:num_bytes])


class _Shape(NamedTuple):
    dtype: torch.dtype
    sizes: torch.Size

    @property
    def num_bytes(self) -> int:
        return self.sizes.numel() * self.dtype.itemsize


class _SentResults(NamedTuple):
    host: Tensor
    order: Sequence[int]  # indices of the results in the order of their copy
    shapes: Sequence[_Shape]  # in this order
    fence: Fence

    def read(self) -> list[Array]:
        self.fence.wait()
        parts = self.host.split([shape.num_bytes for shape in self.shapes])
        arrays = {
            index: part.view(shape.dtype).view(shape.sizes).numpy()
            for index, shape, part in zip(self.order, self.shapes, parts, strict=True)
        }
        return [arrays[index] for index in range(len(arrays))]


def make_outputs(device: Device) -> StepOutputs:
    return SHARED_OUTPUTS if device.shares_host_memory else PackedOutputs(device)
