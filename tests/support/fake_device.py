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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor

from baton.engine.runner.device.device import Graph, GraphPool, MemoryProfile
from baton.kv_transfer.fence import Fence
from tests.support.device_operations import CAPTURING, DeviceOperations, caller
from tests.support.device_tensors import PLACE, Allocation, DeviceTensor, fill_with_garbage


@dataclass(frozen=True, slots=True)
class Costs:
    """Times on the simulated clock."""

    launch_s: float = 1e-6
    copy_s: float = 1e-5
    replay_s: float = 1e-6


@dataclass(slots=True)
class Counts:
    launches: int = 0
    replays: int = 0
    allocations: int = 0
    copies_in: list[str] = field(default_factory=list)  # by the code that made them
    copies_out: list[str] = field(default_factory=list)
    synchronizations: list[str] = field(default_factory=list)


class Work(NamedTuple):
    end_s: float
    run: Callable[[], object]


class Recorded(NamedTuple):
    """Work of a graph."""

    run: Callable[[], object]
    reads: tuple[weakref.ref[Allocation], ...]  # memory from outside of the graph's pool


class FakeDevice:
    """Implements `Device`. Computes inside of its `with` block."""

    place = PLACE
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
        self._free_at_s = 0.0  # when all launched work is done
        self._queue: deque[Work] = deque()
        self._num_launched = self._num_landed = 0
        self._recorded: list[Recorded] | None = None
        self._captured: list[Allocation] = []
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
        return FakeFence(self, self._num_launched, self._free_at_s)

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

    # --- the clock --------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass, and land the work that is done by then."""
        self.now_s += seconds
        with torch.inference_mode(mode=False), torch.no_grad():
            while self._queue and self._queue[0].end_s <= self.now_s:
                self._queue.popleft().run()
                self._num_landed += 1

    def synchronize(self) -> None:
        """Let the CPU wait for all launched work."""
        if self.is_capturing:
            raise RuntimeError(f"synchronisation {CAPTURING}")
        self.counts.synchronizations.append(caller())
        self.wait()

    def wait(self) -> None:
        """Let the time pass that all launched work takes."""
        self.advance(max(0.0, self._free_at_s - self.now_s))

    @property
    def is_idle(self) -> bool:
        return not self._queue

    def has_landed(self, num_launched: int) -> bool:
        self.advance(0.0)
        return self._num_landed >= num_launched

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of what is in the memory now, for a test."""
        assert isinstance(tensor, DeviceTensor)
        return tensor.hidden.clone()

    @property
    def is_capturing(self) -> bool:
        return self._recorded is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        return any(begin <= first < end for begin, end in self._pinned_ranges)

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

    def enqueue(self, run: Callable[[], object], cost_s: float) -> None:
        self._free_at_s = max(self.now_s, self._free_at_s) + cost_s
        self._queue.append(Work(self._free_at_s, run))
        self._num_launched += 1

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


class FakeFence:
    def __init__(self, device: FakeDevice, num_launched: int, end_s: float) -> None:
        self._device = device
        self._num_launched = num_launched
        self._end_s = end_s

    @property
    def is_passed(self) -> bool:
        return self._device.has_landed(self._num_launched)

    def wait(self) -> None:
        """Wait; a fence that has passed costs no synchronisation."""
        if not self.is_passed:
            self._device.counts.synchronizations.append(caller())
            self._device.advance(max(0.0, self._end_s - self._device.now_s))


class FakeGraphPool:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def capture(self, run: Callable[[], None]) -> Graph:
        with self._device.recording() as (recorded, allocations):
            run()
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
