"""Reads a blocking call on another thread, so that Ctrl-C never strikes inside of gRPC.

gRPC waits for messages under a condition. A signal that is raised in there leaves its lock taken
or not taken, as it happens, and whatever comes after fails or hangs; one that is raised while a
call starts leaves a call that nobody serves, and its channel never closes. Waiting for a
SimpleQueue can be broken off anywhere.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from baton.interrupts import get_interruptibly

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Call(Protocol[T_co]):
    """One that streams what it gets."""

    def __iter__(self) -> Iterator[T_co]: ...

    def cancel(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Ended:
    error: Exception | None = None


def read_elsewhere(start: Callable[[], Call[T]]) -> Generator[T, None, None]:
    """What the call gets. Left early, by a signal too, the call is cancelled. Raises RpcError."""
    reading = _Reading(start)
    try:
        # Thread.start would wait under a condition itself. Nobody waits for this one at the end.
        _thread.start_new_thread(reading.run, ())
        while not isinstance(letter := get_interruptibly(reading.letters), Ended):
            yield letter
    finally:
        reading.leave()
    if letter.error is not None:
        raise letter.error


class _Reading(Generic[T]):
    """One call from its start on. Broken off in its start, it would keep its channel open."""

    def __init__(self, start: Callable[[], Call[T]]) -> None:
        self.letters: SimpleQueue[T | Ended] = SimpleQueue()
        self._start = start
        self._call: Call[T] | None = None
        self._is_left = False

    def run(self) -> None:
        try:
            self._call = call = self._start()
            if self._is_left:  # before there was a call to cancel
                call.cancel()
            for message in call:
                self.letters.put(message)
        except Exception as error:  # noqa: BLE001 - it is raised where somebody waits for it
            self.letters.put(Ended(error))
        else:
            self.letters.put(Ended())

    def leave(self) -> None:
        self._is_left = True
        if self._call is not None:
            self._call.cancel()
