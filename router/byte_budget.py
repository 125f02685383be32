"""Budget of the bytes that requests hold in memory: large bodies, files and pictures. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.rpc.errors import QueueFull

MAX_BYTES_IN_FLIGHT = 256 << 20
RETRY_AFTER_S = 1.0


class ByteBudget:
    """Memory for what is large in requests, shared by all requests of the router."""

    def __init__(self, max_bytes: int = MAX_BYTES_IN_FLIGHT) -> None:
        self.max_bytes = max_bytes
        self.num_held = 0

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Yield a lease that is released when the block ends."""
        lease = Lease(self)
        try:
            yield lease
        finally:
            lease.release()


@dataclass(slots=True)
class Lease:
    budget: ByteBudget
    num_bytes: int = 0

    def grow_to(self, num_bytes: int) -> None:
        """Raises QueueFull if all requests together would exceed the budget."""
        num_more = num_bytes - self.num_bytes
        if self.budget.num_held + num_more > self.budget.max_bytes:
            raise QueueFull(
                f"large bodies of other requests take {self.budget.num_held >> 20} of "
                f"{self.budget.max_bytes >> 20} MiB; send this one later",
                RETRY_AFTER_S,
            )
        self.num_bytes = num_bytes
        self.budget.num_held += num_more

    def add(self, num_bytes: int) -> None:
        """Raises QueueFull as `grow_to` does."""
        self.grow_to(self.num_bytes + num_bytes)

    def release(self) -> None:
        self.budget.num_held -= self.num_bytes
        self.num_bytes = 0
