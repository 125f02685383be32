"""Fences of the runner's device: nothing on the CPU, CUDA events on a GPU."""

from __future__ import annotations

from typing import Protocol

import torch

from kv_transfer.fence import PASSED, Fence


class Fences(Protocol):
    def record(self) -> Fence:
        """A fence behind everything that was launched so far."""
        ...

    def drain(self) -> None:
        """Returns when everything that was launched so far is done."""
        ...


class SynchronousFences:
    """Of a device on which an operation is done when its call returns."""

    def record(self) -> Fence:
        return PASSED

    def drain(self) -> None:
        """Everything is done."""


class CudaFence:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def is_passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaFences:
    """Events on the device's current stream, on which the runner launches all of a pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self) -> Fence:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return CudaFence(event)

    def drain(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def fences_of(device: torch.device) -> Fences:
    return CudaFences(device) if device.type == "cuda" else SynchronousFences()
