"""Reads a blocking call on another thread, so that Ctrl-C never strikes inside of gRPC.

gRPC waits for messages under a condition. A signal that is raised in there leaves its lock taken
or not taken, as it happens, and whatever comes after fails or hangs. Waiting for a SimpleQueue
can be broken off anywhere.
"""

from __future__ import annotations

import _thread
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, TypeVar

import grpc

from baton.interrupts import get_interruptibly

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Call(Protocol[T_co]):
    """One that streams what it gets."""

    def __iter__(self) -> Iterator[T_co]: ...

    def cancel(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Ended:
    error: grpc.RpcError | None = None


def read_elsewhere(call: Call[T]) -> Generator[T, None, None]:
    """What the call gets. Left early, by a signal too, the call is cancelled. Raises RpcError."""
    letters: SimpleQueue[T | Ended] = SimpleQueue()
    # Thread.start would wait under a condition itself. Nobody waits for this one at the end.
    _thread.start_new_thread(_read, (call, letters))
    try:
        while not isinstance(letter := get_interruptibly(letters), Ended):
            yield letter
    finally:
        call.cancel()
    if letter.error is not None:
        raise letter.error


def _read(call: Call[T], letters: SimpleQueue[T | Ended]) -> None:
    try:
        for message in call:
            letters.put(message)
    except grpc.RpcError as error:
        letters.put(Ended(error))
    else:
        letters.put(Ended())
