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


def keep_warm(start: Start, lifetime: ExitStack) -> Start:
    """Wrap `start`: the engine starts at its first turn and runs until `lifetime` ends."""
    apis: list[CompletionsApi] = []

    @contextmanager
    def turn() -> Iterator[CompletionsApi]:
        if not apis:
            apis.append(lifetime.enter_context(start()))
        api = apis[0]
        _signal(api, signal.SIGCONT)
        try:
            yield api
        finally:
            _signal(api, signal.SIGSTOP)

    return turn


def _signal(api: CompletionsApi, number: signal.Signals) -> None:
    for group in api.groups:
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            raise EngineFailed(f"the engine at {api.url} has ended") from None
