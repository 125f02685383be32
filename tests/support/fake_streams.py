"""Queues of work of a simulated device, their fences, and its streams of copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tests.support.device_operations import caller
from tests.support.device_tensors import DeviceTensor

if TYPE_CHECKING:
    from tests.support.fake_device import FakeDevice


class Work(NamedTuple):
    end_s: float
    run: Callable[[], object]


class WorkQueue:
    """Work that lands in order, once its time has come."""

    def __init__(self) -> None:
        self.free_at_s = 0.0  # when all launched work is done
        self.num_launched = self.num_landed = 0
        self._works: deque[Work] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._works

    @property
    def next_end_s(self) -> float:
        return self._works[0].end_s if self._works else float("inf")

    def add(self, run: Callable[[], object], now_s: float, cost_s: float) -> None:
        self.free_at_s = max(now_s, self.free_at_s) + cost_s
        self._works.append(Work(self.free_at_s, run))
        self.num_launched += 1

    def land(self) -> None:
        self._works.popleft().run()
        self.num_landed += 1


class FakeFence:
    """Fence after the work in a queue."""

    def __init__(self, device: FakeDevice, queue: WorkQueue) -> None:
        self._device = device
        self._queue = queue
        self._num_launched = queue.num_launched
        self._end_s = queue.free_at_s

    @property
    def is_passed(self) -> bool:
        self._device.advance(0.0)
        return self._queue.num_landed >= self._num_launched

    def wait(self) -> None:
        """Wait; a fence that has passed costs no synchronisation."""
        if not self.is_passed:
            self._device.counts.synchronizations.append(caller())
            self._device.advance_to(self._end_s)


class FakeCopyStream:
    """Implements `CopyStream`: its copies land next to the launches. Thread-safe."""

    def __init__(self, device: FakeDevice, queue: WorkQueue) -> None:
        self._device = device
        self._queue = queue
        self.num_copies = 0
        self.fails_at_copy: int | None = None  # counted from one
        self.on_copy: Callable[[], None] = lambda: None  # called after a copy began
        self.num_pinned = 0  # memories

    @property
    def is_idle(self) -> bool:
        return self._queue.is_idle

    @contextmanager
    def pinned(self, memory: Tensor) -> Iterator[None]:
        self.num_pinned += 1
        with self._device.pinned(memory):
            yield
        self.num_pinned -= 1

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self.num_copies += 1
        if self.num_copies == self.fails_at_copy:
            raise RuntimeError("copy failed, as the test wants")
        on_host = src if isinstance(dst, DeviceTensor) else dst
        if not self._device.is_pinned(on_host):
            raise RuntimeError("a copy of pageable memory is not asynchronous")
        to, source = (
            each.hidden if isinstance(each, DeviceTensor) else each for each in (dst, src)
        )

        def land() -> None:
            with torch.inference_mode():  # one of them may have been made in a pass
                to.copy_(source)

        self._device.enqueue(land, self._device.costs.block_copy_s, self._queue)
        self.on_copy()

    def record(self) -> FakeFence:
        return FakeFence(self._device, self._queue)

    def drain(self) -> None:
        self._device.advance_to(self._queue.free_at_s)
