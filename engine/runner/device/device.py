"""The runner's device: what differs between kinds of devices, as the CPU does it.

torch computes on any device; this covers the rest: memory that the device copies from, fences,
graphs, streams of copies and free memory. Another kind of device is derived from it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton.engine.errors import PassHookFailed
from baton.engine.runner.device.host_memory import free_host_bytes
from baton.engine.runner.model_info import NO_LAYER, PassHook
from baton.kv_transfer.fence import PASSED, Fence


class Graph(Protocol):
    """Captured launches."""

    def replay(self) -> None:
        """Launch all of them again, with the memory that they had when they were captured."""
        ...


class GraphPool(Protocol):
    """Graphs that share the memory of their intermediate results: one is replayed at a time."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Capture the launches of `run` without computing anything.

        It must not wait for the device. Tensors that it makes are in the memory of the pool.
        """
        ...


class CopyStream(Protocol):
    """Copies between pinned memory and the device, in the order in which they begin.

    Nothing orders them and the launches of the runner, or those of other streams. Any thread may
    use it.
    """

    def pinned(self, memory: Tensor) -> AbstractContextManager[None]:
        """Pin host memory that exists already within a `with` block.

        Raises InvalidConfig if that fails.
        """
        ...

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Begin a copy. One of the tensors is in pinned memory, both are contiguous."""
        ...

    def record(self) -> Fence:
        """Record a fence after all copies begun so far. The CPU is not busy while it waits."""
        ...

    def drain(self) -> None:
        """Wait until all copies begun so far are done."""
        ...


class MemoryProfile(NamedTuple):
    """Memory of a device in bytes, and the most that was taken while something ran on it."""

    total_bytes: int
    free_bytes: int  # after it had run, for all processes
    own_bytes: int  # taken by this process before
    run_bytes: int  # taken in addition while it ran


class Device:
    """The CPU, and base of other devices that the runner computes on.

    Work is done in the order of its launch; on the CPU, when its call returns.
    """

    torch_device = torch.device("cpu")
    shares_host_memory = True  # the device computes on arrays of the CPU without a copy

    def pin(self, num_bytes: int) -> Tensor:
        """Allocate host memory from which the device copies while the CPU goes on."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record(self) -> Fence:
        """Record a fence after all work launched so far."""
        return PASSED

    def drain(self) -> None:
        """Wait until all work launched so far is done."""

    def free_bytes(self) -> int:
        """Return the free memory, on the CPU within the container's limits."""
        return free_host_bytes()

    def profile(self, run: Callable[[], None]) -> MemoryProfile | None:
        """Run it and return the memory that it takes, or None, without running it, on a CPU.

        Memory of a CPU is taken when it is first written.
        """
        return None

    def make_graph_pool(self) -> GraphPool | None:
        """Return an empty pool, or None if the device has no graphs."""
        return None

    def make_copy_stream(self) -> CopyStream | None:
        """Return a stream of its own, or None on the CPU, which needs no copies."""
        return None


CPU = Device()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's accelerator the one on which kernels are launched."""
    index = tensor.get_device()  # -1 on the CPU
    return torch.accelerator.device_index(None if index < 0 else index)


class FencedHook:
    """Calls a pass hook with a completion fence per layer.

    Exceptions of the hook are raised as PassHookFailed, to tell them from failures of the pass.
    In a retry, layers are reported as NO_LAYER, so that none of them is sent.
    """

    def __init__(self, hook: PassHook, device: Device, is_retry: bool) -> None:
        self._hook = hook
        self._device = device
        self._is_retry = is_retry

    def layer_done(self, layer: int) -> None:
        try:
            self._report(layer, self._device.record())
        except Exception as root:
            raise PassHookFailed(root) from root

    def layers_done(self, num_layers: int) -> None:
        """Report layers that were launched together, with one fence."""
        try:
            fence = self._device.record()
            for layer in range(num_layers):
                self._report(layer, fence)
        except Exception as root:
            raise PassHookFailed(root) from root

    def pass_done(self) -> None:
        try:
            self._hook.pass_done()
        except Exception as root:
            raise PassHookFailed(root) from root

    def _report(self, layer: int, fence: Fence) -> None:
        # Other rows of the plan may not have run yet, and their blocks wait for this layer.
        self._hook.layer_done(NO_LAYER if self._is_retry else layer, fence)
