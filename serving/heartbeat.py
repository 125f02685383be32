"""Readiness follows the engine's own heartbeat, not the socket."""

from __future__ import annotations

import asyncio
from typing import Protocol

from serving.health import Health

CHECK_S = 0.5
# A step of this length is taken for a stuck engine; long prompts on slow machines stay below.
LONGEST_STEP_S = 30.0


class HasHeartbeat(Protocol):
    @property
    def failure(self) -> BaseException | None: ...

    def since_last_beat_s(self) -> float: ...


async def follow_heartbeat(engine: HasHeartbeat, health: Health) -> BaseException:
    """Keeps health true until the engine fails, and returns why it did."""
    while engine.failure is None:
        await health.set_ready(engine.since_last_beat_s() < LONGEST_STEP_S)
        await asyncio.sleep(CHECK_S)
    await health.set_ready(False)
    return engine.failure
