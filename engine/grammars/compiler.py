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
MOST_REMEMBERED_CHARACTERS = 1 << 22  # compiled forms take memory by the length of their texts
LARGE_CHARACTERS = 1 << 16  # longer texts, which take seconds, have a thread of their own
STACK_BYTES = 128 << 20  # of address space: only what is reached takes memory

log = logging.getLogger(__name__)

Compiled = TypeVar("Compiled")
CompiledOut = TypeVar("CompiledOut", covariant=True)
_Orders = queue.SimpleQueue[StructuredOutputs | None]


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
        most_remembered_characters: int = MOST_REMEMBERED_CHARACTERS,
    ) -> None:
        self._library = library
        self._most_remembered = most_remembered
        self._most_remembered_characters = most_remembered_characters
        self._num_remembered_characters = 0
        self._remembered: OrderedDict[StructuredOutputs, Compiled] = OrderedDict()
        self._awaited: dict[
            StructuredOutputs, list[Callable[[Compiled | InvalidRequest], None]]
        ] = {}
        self._books = threading.Lock()  # held for all of the above
        self._orders: _Orders = queue.SimpleQueue()
        self._large_orders: _Orders = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(self._orders,), name=f"grammars-{number}")
            for number in range(num_threads)
        ]
        self._threads.append(
            threading.Thread(target=self._work, args=(self._large_orders,), name="grammars-large")
        )

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
        for _ in self._threads[1:]:
            self._orders.put(None)
        self._large_orders.put(None)
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
                    is_large = len(wanted.text) > LARGE_CHARACTERS
                    (self._large_orders if is_large else self._orders).put(wanted)
                return
            self._remembered.move_to_end(wanted)
        on_compiled(known)

    def _work(self, orders: _Orders) -> None:
        while (wanted := orders.get()) is not None:
            with self._books:
                is_awaited = wanted in self._awaited
            if is_awaited:
                self._tell(wanted, self._outcome(wanted))

    def _tell(self, wanted: StructuredOutputs, outcome: Compiled | InvalidRequest) -> None:
        with self._books:
            # A refusal is not remembered: the next one may find a tokenizer that was missing.
            if not isinstance(outcome, InvalidRequest):
                self._remember(wanted, outcome)
            awaited = self._awaited.pop(wanted, [])
        for on_compiled in awaited:
            on_compiled(outcome)

    def _remember(self, wanted: StructuredOutputs, compiled: Compiled) -> None:
        self._remembered[wanted] = compiled
        self._num_remembered_characters += len(wanted.text)
        while len(self._remembered) > self._most_remembered or (
            self._num_remembered_characters > self._most_remembered_characters
        ):
            oldest, _ = self._remembered.popitem(last=False)
            self._num_remembered_characters -= len(oldest.text)

    def _outcome(self, wanted: StructuredOutputs) -> Compiled | InvalidRequest:
        try:
            return self._library.compile(wanted)
        except InvalidRequest as refusal:
            return refusal
        except BaseException:
            log.exception("a grammar could not be compiled for a bug")
            return InvalidRequest(f"{FIELD}.{wanted.form}: compiling it failed", FIELD)
