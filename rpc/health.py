"""Readiness and liveness of this process, with a stream of readiness changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

HEALTH = "grpc.health.v1.Health"
# Service name of liveness probes, which restart the process when they fail. Readiness does not
# qualify for that: it is false while the process drains or while a router has no nodes.
LIVENESS = "live"


class Health:
    """Readiness of the whole process, reported for each of its services."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self.services = frozenset({"", *services})
        self.is_alive = True  # False: only a restart can help
        self._is_ready = False
        self._changed = asyncio.Condition()

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    async def set_ready(self, is_ready: bool) -> None:
        async with self._changed:
            if is_ready != self._is_ready:
                self._is_ready = is_ready
                self._changed.notify_all()

    async def changes(self) -> AsyncGenerator[bool, None]:
        """Yield the current readiness, then each change."""
        is_ready = self._is_ready
        while True:
            yield is_ready
            async with self._changed:
                while is_ready is self._is_ready:
                    await self._changed.wait()
                is_ready = self._is_ready
