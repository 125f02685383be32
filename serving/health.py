"""Whether this process can serve, and every change of that for whoever watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

HEALTH = "grpc.health.v1.Health"
# What a probe asks for when it would restart the process: not whether it is ready, which it is
# not while it drains or while a router has no nodes.
LIVENESS = "live"


class Health:
    """The readiness of the whole process, told alike for each of its services."""

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
        """What it is now, and each change after it."""
        is_ready = self._is_ready
        while True:
            yield is_ready
            async with self._changed:
                while is_ready is self._is_ready:
                    await self._changed.wait()
                is_ready = self._is_ready
