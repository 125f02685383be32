"""Streams of blocking calls, read on another thread so that Ctrl-C never interrupts gRPC.

gRPC waits for messages on a condition. A KeyboardInterrupt raised inside that wait leaves its
lock in an undefined state, and later calls fail or hang. One raised while a call starts leaks
the call, and its channel never closes. Waiting on a SimpleQueue can be interrupted anywhere.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from baton.interrupts import get_interruptibly


@dataclass(frozen=True, slots=True)
class EndOfStream:
    error: Exception | None = None


def stream_interruptibly(start: Callable[[], Any]) -> Generator[Any, None, None]:
    """Yield the messages of a call that `start` begins. Raises RpcError.

    The call is cancelled if the generator is closed early, also by a signal.
    """
    reader = _StreamReader(start)
    try:
        # Thread.start would itself wait on a condition. This thread is never joined.
        _thread.start_new_thread(reader.run, ())
        while not isinstance(message := get_interruptibly(reader.messages), EndOfStream):
            yield message
    finally:
        reader.close()
    if message.error is not None:
        raise message.error


class _StreamReader:
    """Thread that starts and reads one call: an interrupted start would leak the channel."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self.messages: SimpleQueue[Any] = SimpleQueue()
        self._start = start
        self._call: Any = None
        self._is_closed = False

    def run(self) -> None:
        try:
            self._call = call = self._start()
            if self._is_closed:  # closed before there was a call to cancel
                call.cancel()
            for message in call:
                self.messages.put(message)
        except Exception as error:  # noqa: BLE001 - raised again by the consumer
            self.messages.put(EndOfStream(error))
        else:
            self.messages.put(EndOfStream())

    def close(self) -> None:
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()
