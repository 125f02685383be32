"""Readiness and liveness derived from the engine's heartbeat."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from baton.rpc.health import Health

CHECK_S = 0.5
# Multiple of `stuck_after_s` without a heartbeat after which the process counts as dead.
DEAD_FACTOR = 5

log = logging.getLogger(__name__)


class HasHeartbeat(Protocol):
    @property
    def failure(self) -> BaseException | None: ...

    def seconds_since_heartbeat(self) -> float: ...


async def follow_heartbeat(
    engine: HasHeartbeat, health: Health, stuck_after_s: float
) -> BaseException:
    """Update `health` from the heartbeat until the engine fails. Return the engine's failure."""
    while engine.failure is None:
        silence_s = engine.seconds_since_heartbeat()
        health.is_alive = silence_s < DEAD_FACTOR * stuck_after_s
        is_ready = silence_s < stuck_after_s
        if health.is_ready and not is_ready:
            log.warning(
                "no heartbeat of the engine for %.1f s: not ready until the next", silence_s
            )
        await health.set_ready(is_ready)
        await asyncio.sleep(CHECK_S)
    await health.set_ready(False)
    return engine.failure
