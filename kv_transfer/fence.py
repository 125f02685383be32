"""Completion fences of a device, which separate "launched" from "written".

A device such as a GPU computes asynchronously: when the kernels that write a layer's KV are
launched, the KV is not in its memory yet. A fence is recorded after them, as a CUDA event is.
Once the fence has passed, the KV can be read and sent. Fences after passes pass in the order in
which they were recorded, and those after copies of a stream do, too.
"""

from __future__ import annotations

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
