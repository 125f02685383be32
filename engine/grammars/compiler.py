"""Grammars are compiled on threads of their own, one time each as long as they are remembered."""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from engine.errors import InvalidRequest
from engine.structured_outputs import FIELD, StructuredOutputs

NUM_THREADS = 2
MOST_REMEMBERED = 64
STACK_BYTES = 128 << 20  # of address space: only what is reached takes memory

log = logging.getLogger(__name__)

Compiled = TypeVar("Compiled")
CompiledOut = TypeVar("CompiledOut", covariant=True)


class Library(Protocol[CompiledOut]):
    def compile(self, wanted: StructuredOutputs) -> CompiledOut:
        """Raises InvalidRequest."""
        ...


class GrammarCompiler(Generic[Compiled]):
    """Works from `with` to the end of the block."""

    def __init__(
        self,
        library: Library[Compiled],
        *,
        num_threads: int = NUM_THREADS,
        most_remembered: int = MOST_REMEMBERED,
    ) -> None:
        self._library = library
        self._most_remembered = most_remembered
        self._remembered: OrderedDict[StructuredOutputs, Compiled] = OrderedDict()
        self._awaited: dict[
            StructuredOutputs, list[Callable[[Compiled | InvalidRequest], None]]
        ] = {}
        self._books = threading.Lock()  # held for the two above
        self._orders: queue.SimpleQueue[StructuredOutputs | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"grammars-{number}")
            for number in range(num_threads)
        ]

    def __enter__(self) -> GrammarCompiler[Compiled]:
        usual = threading.stack_size(STACK_BYTES)
        try:
            for thread in self._threads:
                thread.start()
        finally:
            threading.stack_size(usual)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._books:
            self._awaited.clear()  # whoever waits still is told nothing any more
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            thread.join()

    def start(
        self,
        wanted: StructuredOutputs,
        on_compiled: Callable[[Compiled | InvalidRequest], None],
    ) -> None:
        """`on_compiled` is called on the thread that compiled, or at once on the caller's.

        Many that ask for the same at a time wait for the same work.
        """
        with self._books:
            known = self._remembered.get(wanted)
            if known is None:
                awaited = self._awaited.setdefault(wanted, [])
                awaited.append(on_compiled)
                if len(awaited) == 1:
                    self._orders.put(wanted)
                return
            self._remembered.move_to_end(wanted)
        on_compiled(known)

    def _work(self) -> None:
        while (wanted := self._orders.get()) is not None:
            with self._books:
                is_awaited = wanted in self._awaited
            if is_awaited:
                self._tell(wanted, self._outcome(wanted))

    def _tell(self, wanted: StructuredOutputs, outcome: Compiled | InvalidRequest) -> None:
        with self._books:
            # A refusal is not remembered: the next one may find a tokenizer that was missing.
            if not isinstance(outcome, InvalidRequest):
                self._remembered[wanted] = outcome
                if len(self._remembered) > self._most_remembered:
                    self._remembered.popitem(last=False)
            awaited = self._awaited.pop(wanted, [])
        for on_compiled in awaited:
            on_compiled(outcome)

    def _outcome(self, wanted: StructuredOutputs) -> Compiled | InvalidRequest:
        try:
            return self._library.compile(wanted)
        except InvalidRequest as refusal:
            return refusal
        except BaseException:
            log.exception("a grammar could not be compiled for a bug")
            return InvalidRequest(f"{FIELD}.{wanted.form}: compiling it failed", FIELD)
