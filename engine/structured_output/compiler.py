"""Grammar compiler: compiles on background threads, and caches grammars and refusals."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.core.errors import InvalidRequest
from baton.core.fair_queue import FairQueue
from baton.core.structured_outputs import FIELD, StructuredOutputs
from baton.engine.structured_output.compiler_errors import TemporaryRefusal

NUM_THREADS = 2
MAX_CACHED_GRAMMARS = 64
MAX_CACHED_REFUSALS = 256
MAX_CACHED_CHARACTERS = 1 << 22  # of each cache: memory of compiled grammars grows with their texts
LARGE_CHARACTERS = 1 << 16  # longer texts, which take seconds, have a separate thread
STACK_BYTES = 128 << 20  # address space: only touched pages take memory

log = logging.getLogger(__name__)

Compiled = TypeVar("Compiled")
Value = TypeVar("Value")
Item = TypeVar("Item")


class GrammarCompiler(Generic[Compiled]):
    """Compiles grammars on background threads for the duration of a `with` block."""

    def __init__(
        self,
        compile_grammar: Callable[[StructuredOutputs], Compiled],  # raises InvalidRequest
        *,
        num_threads: int = NUM_THREADS,
        max_cached_grammars: int = MAX_CACHED_GRAMMARS,
        max_cached_refusals: int = MAX_CACHED_REFUSALS,
        max_cached_characters: int = MAX_CACHED_CHARACTERS,
    ) -> None:
        self._compile_grammar = compile_grammar
        self._grammars = GrammarCache[Compiled](max_cached_grammars, max_cached_characters)
        # Apart, so that they evict no grammars.
        self._refusals = GrammarCache[InvalidRequest](max_cached_refusals, max_cached_characters)
        self._callbacks: dict[
            StructuredOutputs, list[Callable[[Compiled | InvalidRequest], None]]
        ] = {}
        self._running: set[StructuredOutputs] = set()
        self._lock = threading.Lock()  # guards the caches, the callbacks and what is running
        self._jobs = BlockingFairQueue[StructuredOutputs]()
        self._large_jobs = BlockingFairQueue[StructuredOutputs]()
        self._threads = [
            threading.Thread(target=self._work, args=(self._jobs,), name=f"grammars-{number}")
            for number in range(num_threads)
        ]
        self._threads.append(
            threading.Thread(target=self._work, args=(self._large_jobs,), name="grammars-large")
        )

    def __enter__(self) -> GrammarCompiler[Compiled]:
        usual = threading.stack_size(STACK_BYTES)
        try:
            for thread in self._threads:
                thread.start()
        finally:
            threading.stack_size(usual)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._callbacks.clear()  # pending callbacks are not called any more
        self._jobs.close()
        self._large_jobs.close()
        for thread in self._threads:
            thread.join()

    def start(
        self,
        params: StructuredOutputs,
        on_compiled: Callable[[Compiled | InvalidRequest], None],
        client: str = "",
    ) -> None:
        """Compile a grammar and pass the result to `on_compiled`. Clients take turns.

        The callback runs on the compiling thread, or at once on the caller's if the result is
        cached. Concurrent calls for the same grammar share one compilation.
        """
        with self._lock:
            known = self._known(params)
            if known is None:
                self._callbacks.setdefault(params, []).append(on_compiled)
                # Each client in its turn, though the first job compiles for all.
                is_large = len(params.text) > LARGE_CHARACTERS
                (self._large_jobs if is_large else self._jobs).put(client, params)
                return
        on_compiled(known)

    def cancel(
        self,
        params: StructuredOutputs,
        on_compiled: Callable[[Compiled | InvalidRequest], None],
    ) -> None:
        """Drop a callback, and its compilation if it has not begun and no other one waits for it.

        A callback that is being called cannot be dropped any more.
        """
        with self._lock:
            callbacks = self._callbacks.get(params, [])
            if on_compiled in callbacks:
                callbacks.remove(on_compiled)
            if not callbacks:
                self._callbacks.pop(params, None)

    def _work(self, jobs: BlockingFairQueue[StructuredOutputs]) -> None:
        while (params := jobs.get()) is not None:
            with self._lock:
                is_needed = params in self._callbacks and params not in self._running
                if is_needed:
                    self._running.add(params)
            if is_needed:
                self._publish(params, self._compile(params))

    def _publish(self, params: StructuredOutputs, outcome: Compiled | InvalidRequest) -> None:
        with self._lock:
            if not isinstance(outcome, InvalidRequest):
                self._grammars.add(params, outcome)
            elif not isinstance(outcome, TemporaryRefusal):
                self._refusals.add(params, _copy(outcome))
            self._running.discard(params)
            callbacks = self._callbacks.pop(params, [])
        for on_compiled in callbacks:
            on_compiled(outcome)

    def _known(self, params: StructuredOutputs) -> Compiled | InvalidRequest | None:
        refusal = self._refusals.get(params)
        return self._grammars.get(params) if refusal is None else _copy(refusal)

    def _compile(self, params: StructuredOutputs) -> Compiled | InvalidRequest:
        try:
            return self._compile_grammar(params)
        except InvalidRequest as refusal:
            return refusal
        except BaseException:
            log.exception("compiling a grammar failed with an unexpected exception")
            return TemporaryRefusal(f"{FIELD}.{params.form}: compiling it failed", FIELD)


def _copy(refusal: InvalidRequest) -> InvalidRequest:
    """Return a refusal without a traceback, which would keep what the compilation used."""
    return InvalidRequest(str(refusal), refusal.field)


class GrammarCache(Generic[Value]):
    """Evicts the least recently used grammars beyond a number, and beyond characters in all."""

    def __init__(self, max_grammars: int, max_characters: int) -> None:
        self._max_grammars = max_grammars
        self._max_characters = max_characters
        self._values: OrderedDict[StructuredOutputs, Value] = OrderedDict()
        self._num_characters = 0

    def get(self, params: StructuredOutputs) -> Value | None:
        value = self._values.get(params)
        if value is not None:
            self._values.move_to_end(params)
        return value

    def add(self, params: StructuredOutputs, value: Value) -> None:
        """Add a grammar that is not in the cache."""
        self._values[params] = value
        self._num_characters += len(params.text)
        while len(self._values) > self._max_grammars or (
            self._num_characters > self._max_characters
        ):
            oldest, _ = self._values.popitem(last=False)
            self._num_characters -= len(oldest.text)


class BlockingFairQueue(Generic[Item]):
    """Items of a client are in order; clients with items take turns."""

    def __init__(self) -> None:
        self._queue = FairQueue[str, Item]()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, client: str, item: Item) -> None:
        with self._changed:
            self._queue.add(client, item)
            self._changed.notify()

    def get(self) -> Item | None:
        """Wait for an item and remove it. Returns None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue.has_any() or self._is_closed)
            return None if self._is_closed else self._queue.take()

    def close(self) -> None:
        """Drop the items, and let all threads that wait return."""
        with self._changed:
            self._queue.clear()
            self._is_closed = True
            self._changed.notify_all()
