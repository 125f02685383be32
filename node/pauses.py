"""Pauses of a node's scheduler, ordered by operators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from baton.core.pause_mode import PauseMode
from baton.engine.engine_thread import EngineThread
from baton.engine.scheduler.scheduler import Scheduler
from baton.node.engine_calls import run_on_engine

SetPause = Callable[[PauseMode | None], Awaitable[None]]  # None: resume


async def set_pause(engine: EngineThread, scheduler: Scheduler, mode: PauseMode | None) -> None:
    """Pause, and return when nothing is computed any more, or resume. Raises EngineStopped."""
    if mode is None:
        await run_on_engine(engine, scheduler.resume)
        return
    await run_on_engine(engine, partial(scheduler.pause, mode))
    await asyncio.wrap_future(engine.when(lambda: scheduler.has_paused))
