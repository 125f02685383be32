"""Readiness follows the engine's own heartbeat, not the socket."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from serving.health import Health

CHECK_S = 0.5
# An engine that is stuck for so many times as long as makes it unready will not come back.
DEAD_FACTOR = 5

log = logging.getLogger(__name__)


class HasHeartbeat(Protocol):
    @property
    def failure(self) -> BaseException | None: ...

    def since_last_beat_s(self) -> float: ...


async def follow_heartbeat(
    engine: HasHeartbeat, health: Health, stuck_after_s: float
) -> BaseException:
    """Keeps health true until the engine fails, and returns why it did."""
    while engine.failure is None:
        silence_s = engine.since_last_beat_s()
        health.is_alive = silence_s < DEAD_FACTOR * stuck_after_s
        is_ready = silence_s < stuck_after_s
        if health.is_ready and not is_ready:
            log.warning("the engine has not moved for %.1f s: not ready until it does", silence_s)
        await health.set_ready(is_ready)
        await asyncio.sleep(CHECK_S)
    await health.set_ready(False)
    return engine.failure
