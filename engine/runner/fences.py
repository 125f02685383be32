"""Completion fences of the runner's device: no-ops on the CPU, CUDA events on a GPU.

A pass hook gets one with each layer.
"""

from __future__ import annotations

from typing import Protocol

import torch

from baton.engine.errors import PassHookFailed
from baton.engine.runner.model_info import NO_LAYER, PassHook
from baton.kv_transfer.fence import PASSED, Fence


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


class FencedHook:
    """Calls a pass hook with a completion fence per layer.

    Exceptions of the hook are raised as PassHookFailed, to tell them from failures of the pass.
    In a retry, layers are reported as NO_LAYER, so that none of them is sent.
    """

    def __init__(self, hook: PassHook, fences: Fences, is_retry: bool) -> None:
        self._hook = hook
        self._fences = fences
        self._is_retry = is_retry

    def layer_done(self, layer: int) -> None:
        try:
            # Other rows of the plan may not have run yet, and their blocks wait for this layer.
            fence = self._fences.record()
            self._hook.layer_done(NO_LAYER if self._is_retry else layer, fence)
        except Exception as root:
            raise PassHookFailed(root) from root

    def pass_done(self) -> None:
        try:
            self._hook.pass_done()
        except Exception as root:
            raise PassHookFailed(root) from root
