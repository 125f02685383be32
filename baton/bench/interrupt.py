"""Ctrl-C during a measurement."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def stop_on_interrupt() -> AsyncIterator[asyncio.Event]:
    """Yield an event that Ctrl-C sets, which ends the run and reports what was measured."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
