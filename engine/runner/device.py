"""The runner's device: copies of a step's input to it, and completion fences.

Fences are no-ops on the CPU and CUDA events on a GPU. A pass hook gets one with each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.errors import PassHookFailed
from baton.engine.runner.model_info import NO_LAYER, PassHook
from baton.kv_transfer.fence import PASSED, Fence

Array = npt.NDArray[Any]
ALIGNMENT = 8  # bytes, of the largest numbers that are copied


def to_device(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Return arrays of a step's input as tensors on the device.

    On the CPU they share the memory of the arrays. A GPU gets them in a single transfer: one per
    array would cost more time than the bytes.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return copy_together(arrays, device)


def copy_together(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Copy arrays in one piece. The tensors are views of its parts."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    packed = np.zeros(sum(sizes), dtype=np.uint8)
    start = 0
    for array, size in zip(arrays, sizes, strict=True):
        packed[start : start + array.nbytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
        start += size
    parts = torch.from_numpy(packed).to(device).split(sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, part in zip(arrays, parts, strict=True)
    ]


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
