"""Runs of benchmarks: what they measure, their progress, and Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from baton.client import AsyncClient

Connect = Callable[[str], AsyncClient]
OnProgress = Callable[[str, int, int], None]  # name of the run, ended and planned requests


@asynccontextmanager
async def stop_on_interrupt() -> AsyncIterator[asyncio.Event]:
    """Yield an event that Ctrl-C sets, which ends the run and reports what was measured."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, which is cancelled when `stop` is set. Return whether it was."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    is_cut_short = not working.done()
    for task in (working, stopping):
        task.cancel()
    ended = await asyncio.gather(working, stopping, return_exceptions=True)
    if isinstance(ended[0], Exception):
        raise ended[0]
    return is_cut_short
