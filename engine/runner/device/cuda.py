"""CUDA devices: the only module that calls torch.cuda."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.engine.runner.device.device import (
    CPU,
    CopyStream,
    Device,
    Graph,
    GraphPool,
    MemoryProfile,
)
from baton.kv_transfer.fence import Fence


class CudaFence:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def is_passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice(Device):
    """A GPU, by the current stream, on which the runner launches everything."""

    shares_host_memory = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def pin(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record(self) -> Fence:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return CudaFence(event)

    def drain(self) -> None:
        torch.cuda.current_stream(self.torch_device).synchronize()

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free)

    def profile(self, run: Callable[[], None]) -> MemoryProfile | None:
        self._release_unused()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        own = torch.cuda.memory_reserved(self.torch_device)
        run()
        torch.cuda.synchronize(self.torch_device)
        most = torch.cuda.max_memory_reserved(self.torch_device)
        self._release_unused()
        # Now, with what libraries have allocated for themselves.
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return MemoryProfile(total, free, own, most - own)

    def _release_unused(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def make_graph_pool(self) -> GraphPool | None:
        return CudaGraphPool(self.torch_device)

    def make_copy_stream(self) -> CopyStream | None:
        return CudaCopyStream(self.torch_device)


class CudaCopyStream:
    """Implements `CopyStream` by a stream that does not wait for the default one."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self._stream = torch.cuda.Stream(torch_device)

    @contextmanager
    def pinned(self, memory: Tensor) -> Iterator[None]:
        """Register memory rather than allocate it, as torch does.

        It keeps its huge pages and its size. torch may round sizes up to a power of two.
        """
        runtime, address = torch.cuda.cudart(), memory.data_ptr()
        with torch.cuda.device(self._torch_device):
            error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
        if error:
            raise InvalidConfig(
                f"CUDA cannot pin {memory.nbytes} bytes of host memory: cudaHostRegister returned "
                f"error {error}; use less of it"
            )
        try:
            yield
        finally:
            with torch.cuda.device(self._torch_device):
                runtime.cudaHostUnregister(address)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            dst.copy_(src, non_blocking=True)

    def record(self) -> Fence:
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        event.record(self._stream)
        return CudaFence(event)

    def drain(self) -> None:
        self._stream.synchronize()


class CudaGraphPool:
    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        own_stream = torch.cuda.current_stream(self._torch_device)
        try:
            with torch.cuda.device(self._torch_device), torch.cuda.graph(graph, pool=self._pool):
                run()
        finally:
            torch.cuda.set_stream(own_stream)  # torch does not, if the capture cannot be ended
        return CudaGraph(graph, self._torch_device)


class CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, torch_device: torch.device) -> None:
        self._graph = graph
        self._torch_device = torch_device

    def replay(self) -> None:
        with torch.cuda.device(self._torch_device):
            self._graph.replay()


def open_device(name: str) -> Device:
    """Return the device with this name: cpu, or that of an accelerator. Raises InvalidConfig."""
    torch_device = torch.device(name)
    if torch_device.type == "cpu":
        return CPU
    if (torch_device.index or 0) >= torch.cuda.device_count():
        raise InvalidConfig(f"device {name!r}: this torch build or machine has no such CUDA device")
    return CudaDevice(torch_device)


def count_processors(torch_device: torch.device) -> int:
    """Return the streaming multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(torch_device).multi_processor_count)
