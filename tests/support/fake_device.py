"""Simulated asynchronous device with its own memory, on which torch computes.

Tensors of the device hold their numbers in hidden CPU tensors, which only launched work reads and
writes. Work lands in order, when its time on the simulated clock has come: the CPU waits for it
(synchronises), or the test advances the clock. Memory that no work has written yet is garbage.

As on CUDA, a copy is asynchronous only if it is non-blocking and the host memory is pinned, and
what needs the numbers (`tolist`, `nonzero`) waits for all work. A graph records work instead of
doing it, and then reads and writes the memory of its capture, whatever became of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import _disable_current_modes

from baton.engine.runner.device.device import Device, Graph, GraphPool, MemoryProfile
from baton.kv_transfer.fence import Fence
from tests.support.device_operations import CAPTURING, DeviceOperations, caller
from tests.support.device_tensors import PLACE, Allocation, DeviceTensor, fill_with_garbage
from tests.support.fake_streams import FakeCopyStream, FakeFence, WorkQueue


@dataclass(frozen=True, slots=True)
class Costs:
    """Times on the simulated clock."""

    launch_s: float = 1e-6
    copy_s: float = 1e-5
    replay_s: float = 1e-6
    block_copy_s: float = 1e-5  # of a stream of copies


@dataclass(slots=True)
class Counts:
    launches: int = 0
    replays: int = 0
    allocations: int = 0
    copies_in: list[str] = field(default_factory=list)  # by the code that made them
    copies_out: list[str] = field(default_factory=list)
    synchronizations: list[str] = field(default_factory=list)


class Recorded(NamedTuple):
    """Work of a graph."""

    run: Callable[[], object]
    reads: tuple[weakref.ref[Allocation], ...]  # memory from outside of the graph's pool


class FakeDevice(Device):
    """Computes inside of its `with` block, on one thread.

    Other threads may use its fences and its streams of copies.
    """

    torch_device = PLACE
    shares_host_memory = False

    def __init__(self, *, costs: Costs = Costs(), memory_bytes: int = 1 << 30) -> None:
        self._operations = DeviceOperations(self)
        self.costs = costs
        self.counts = Counts()
        self.now_s = 0.0
        self.fails_at_launch: int | None = None  # counted from one
        self.has_graphs = True
        self.memory_bytes = memory_bytes
        self._used_bytes = self._most_used_bytes = 0
        self._lock = RLock()
        self._queue = WorkQueue()  # of launches
        self._queues = [self._queue]
        self._recorded: list[Recorded] | None = None
        self._captured: list[Allocation] = []
        self.graph_launches: list[int] = []  # of each captured graph
        self._pinned_ranges: list[tuple[int, int]] = []

    def __enter__(self) -> Self:
        self._operations.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._operations.__exit__(*error)

    # --- Device -----------------------------------------------------------------------------------

    def pin(self, num_bytes: int) -> Tensor:
        made = torch.full((num_bytes,), 0xEE, dtype=torch.uint8)
        self._pinned_ranges.append((made.data_ptr(), made.data_ptr() + num_bytes))
        return made

    def record(self) -> Fence:
        with self._lock:
            return FakeFence(self, self._queue)

    def drain(self) -> None:
        self.synchronize()

    def free_bytes(self) -> int:
        return self.memory_bytes - self._used_bytes

    def profile(self, run: Callable[[], None]) -> MemoryProfile | None:
        own = self._most_used_bytes = self._used_bytes
        run()
        self.synchronize()
        added = self._most_used_bytes - own
        return MemoryProfile(self.memory_bytes, self.free_bytes(), own, added)

    def make_graph_pool(self) -> GraphPool | None:
        return FakeGraphPool(self) if self.has_graphs else None

    def make_copy_stream(self) -> FakeCopyStream:
        queue = WorkQueue()
        self._queues.append(queue)
        return FakeCopyStream(self, queue)

    # --- the clock --------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass, and land the work that is done by then."""
        with self._lock:
            self.now_s += seconds
            if min(map(_next_end_s, self._queues)) <= self.now_s:
                self._land()

    def _land(self) -> None:
        """Land the work that is done, whose operations are on memory of the CPU."""
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            DisableTorchFunction(),
            _disable_current_modes(),
        ):
            while (first := min(self._queues, key=_next_end_s)).next_end_s <= self.now_s:
                first.land()

    def advance_to(self, end_s: float) -> None:
        with self._lock:
            self.now_s = max(self.now_s, end_s)
            self.advance(0.0)

    def synchronize(self) -> None:
        """Let the CPU wait for all launched work."""
        if self.is_capturing:
            raise RuntimeError(f"synchronisation {CAPTURING}")
        self.counts.synchronizations.append(caller())
        self.wait()

    def wait(self) -> None:
        """Let the time pass that all launched work takes."""
        self.advance_to(self._queue.free_at_s)

    @property
    def is_idle(self) -> bool:
        return self._queue.is_idle

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of what is in the memory now, for a test."""
        assert isinstance(tensor, DeviceTensor)
        return tensor.hidden.clone()

    @property
    def is_capturing(self) -> bool:
        return self._recorded is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        last = first + max(1, tensor.nbytes) - 1
        return any(begin <= first and last < end for begin, end in self._pinned_ranges)

    @contextmanager
    def pinned(self, memory: Tensor) -> Iterator[None]:
        pinned = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        self._pinned_ranges.append(pinned)
        try:
            yield
        finally:
            self._pinned_ranges.remove(pinned)

    # --- launches ---------------------------------------------------------------------------------

    def launch(
        self, run: Callable[[], object], used: Sequence[DeviceTensor], cost_s: float
    ) -> None:
        self.counts.launches += 1
        if self.counts.launches == self.fails_at_launch:
            raise RuntimeError("launch failed, as the test wants")
        if self._recorded is not None:
            inside = set(self._captured)
            reads = {each.allocation for each in used} - inside
            self._recorded.append(Recorded(run, tuple(weakref.ref(each) for each in reads)))
            return
        self.enqueue(run, cost_s)

    def enqueue(
        self, run: Callable[[], object], cost_s: float, queue: WorkQueue | None = None
    ) -> None:
        """Add work to a queue, or to that of launches."""
        with self._lock:
            (queue or self._queue).add(run, self.now_s, cost_s)

    def allocate(self, like: Tensor) -> DeviceTensor:
        """Return garbage in the shape of a tensor."""
        num_bytes = like.numel() * like.element_size()
        if num_bytes > self.free_bytes():
            raise torch.OutOfMemoryError(f"{num_bytes} bytes of {self.free_bytes()} that are free")
        self.counts.allocations += 1
        hidden = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        fill_with_garbage(hidden)
        allocation = Allocation()
        self._used_bytes += num_bytes
        self._most_used_bytes = max(self._most_used_bytes, self._used_bytes)
        weakref.finalize(allocation, self._release, num_bytes)
        if self._recorded is not None:
            self._captured.append(allocation)
        return DeviceTensor(hidden, allocation)

    def _release(self, num_bytes: int) -> None:
        self._used_bytes -= num_bytes

    @contextmanager
    def recording(self) -> Iterator[tuple[list[Recorded], list[Allocation]]]:
        """Record launches instead of doing them; yields them, and the memory that they allocate."""
        self._recorded, self._captured = [], []
        try:
            yield self._recorded, self._captured
        finally:
            self._recorded, self._captured = None, []


class FakeGraphPool:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def capture(self, run: Callable[[], None]) -> Graph:
        with self._device.recording() as (recorded, allocations):
            run()
        self._device.graph_launches.append(len(recorded))
        return FakeGraph(self._device, recorded, allocations)


class FakeGraph:
    """Recorded work. Its memory lives as long as it does; that of others can be freed before."""

    def __init__(
        self, device: FakeDevice, recorded: Sequence[Recorded], allocations: Sequence[Allocation]
    ) -> None:
        self._device = device
        self._recorded = tuple(recorded)
        self._allocations = tuple(allocations)

    def replay(self) -> None:
        for work in self._recorded:
            if any(read() is None for read in work.reads):
                raise RuntimeError("a graph uses memory that was freed after its capture")
        self._device.counts.replays += 1
        for work in self._recorded:
            self._device.enqueue(work.run, self._device.costs.replay_s)


def _next_end_s(queue: WorkQueue) -> float:
    return queue.next_end_s
