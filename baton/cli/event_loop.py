"""Event loops of commands, which Ctrl-C always ends.

asyncio handles Ctrl-C in Python, after the loop's wait. A signal that arrives just before the
wait, or on a thread of gRPC, does not end it: the command would hang until the next message. A loop
with a signal handler of its own is woken by every signal.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def interruptible_runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=_new_loop)


def run_interruptibly(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop of its own. Raises KeyboardInterrupt after Ctrl-C."""
    with interruptible_runner() as runner:
        return runner.run(main)


def _new_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.add_signal_handler(signal.SIGURG, lambda: None)  # any signal that nothing else uses
    return loop
