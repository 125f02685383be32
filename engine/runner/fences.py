"""Completion fences of the runner's device: no-ops on the CPU, CUDA events on a GPU."""

from __future__ import annotations

from typing import Protocol

import torch

from kv_transfer.fence import PASSED, Fence


class Fences(Protocol):
    def record(self) -> Fence:
        """Record a fence after all work launched so far."""
        ...

    def drain(self) -> None:
        """Wait until all work launched so far is done."""
        ...


class SynchronousFences:
    """Fences of a device on which an operation is done when its call returns."""

    def record(self) -> Fence:
        return PASSED

    def drain(self) -> None:
        """Return at once: all work is already done."""


class CudaFence:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def is_passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaFences:
    """CUDA events on the device's current stream, on which the runner launches every pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self) -> Fence:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return CudaFence(event)

    def drain(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def make_fences(device: torch.device) -> Fences:
    return CudaFences(device) if device.type == "cuda" else SynchronousFences()
