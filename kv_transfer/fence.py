"""Completion fences of a device, which separate "launched" from "written".

A device such as a GPU computes asynchronously: when the kernels that write a layer's KV are
launched, the KV is not in its memory yet. A fence is recorded after them, as a CUDA event is.
Once the fence has passed, the KV can be read and sent. Fences of a device pass in the order in
which they were recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol


class Fence(Protocol):
    """Point in the work queue of a device. Thread-safe; once passed, it stays passed."""

    @property
    def is_passed(self) -> bool:
        """Return whether all work launched before it is done and visible. Does not block."""
        ...

    def wait(self) -> None:
        """Block until the fence has passed."""
        ...


class PassedFence:
    """Fence of a synchronous device, such as the CPU."""

    is_passed = True

    def wait(self) -> None:
        """Return at once."""


PASSED = PassedFence()


class FencedLayers:
    """Layers of the current forward pass whose fences have not passed yet, in order."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, Fence]] = deque()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, num_ended: int, fence: Fence) -> None:
        """Add a fence after which the first `num_ended` layers are written."""
        self._pending.append((num_ended, fence))

    def take_passed(self) -> Iterator[int]:
        """Yield the `num_ended` of each fence that has passed, and remove it."""
        while self._pending and self._pending[0][1].is_passed:
            yield self._pending.popleft()[0]

    def wait_for_next(self) -> None:
        """Block until the first fence has passed, if there is one."""
        if self._pending:
            self._pending[0][1].wait()
