"""Completion fences of a device: they separate "launched" from "written".

A device such as a GPU computes asynchronously: a layer's KV is not in its memory when the kernels
that write it are launched. A fence is recorded behind them, and what they write may leave, or be
read, once the fence is passed. Fences of one device are passed in the order they were recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol


class Fence(Protocol):
    """A point in the work of a device. Any thread may ask; it never becomes unpassed."""

    @property
    def is_passed(self) -> bool:
        """Whether all work launched before it is done and visible to others. Never waits."""
        ...

    def wait(self) -> None:
        """Returns when it is passed."""
        ...


class PassedFence:
    """The fence of a device that computes as it is told, such as the CPU."""

    is_passed = True

    def wait(self) -> None:
        """There is nothing to wait for."""


PASSED = PassedFence()


class FencedLayers:
    """Layers of the pass under way whose fences are not passed yet, in order."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, Fence]] = deque()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, num_ended: int, fence: Fence) -> None:
        """Behind the fence, the first `num_ended` layers are written."""
        self._pending.append((num_ended, fence))

    def take_passed(self) -> Iterator[int]:
        """The numbers of ended layers behind each fence that is passed, each once."""
        while self._pending and self._pending[0][1].is_passed:
            yield self._pending.popleft()[0]

    def wait_for_next(self) -> None:
        """Returns when the first fence is passed, if there is one."""
        if self._pending:
            self._pending[0][1].wait()
