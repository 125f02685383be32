"""Engines that take long to start: started once, frozen between their turns.

An idle server still uses CPU time, some a whole core. A frozen one only keeps its memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from benchmarks.peers.completions_api import CompletionsApi, EngineFailed

# Starts an engine and stops it at the end of the block.
Start = Callable[[], AbstractContextManager[CompletionsApi]]


def staying(start: Start, lifetime: ExitStack) -> Start:
    """Wrap `start`: the engine starts at its first turn and runs until `lifetime` ends."""
    doors: list[CompletionsApi] = []

    @contextmanager
    def turn() -> Iterator[CompletionsApi]:
        if not doors:
            doors.append(lifetime.enter_context(start()))
        door = doors[0]
        _signal(door, signal.SIGCONT)
        try:
            yield door
        finally:
            _signal(door, signal.SIGSTOP)

    return turn


def _signal(door: CompletionsApi, number: signal.Signals) -> None:
    for group in door.groups:
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            raise EngineFailed(f"the engine at {door.url} has ended") from None
