"""Threads that read folders of adapters, any of which can hang, as on a dead network mount."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import TypeVar

from baton.rpc.errors import AdaptersBusy

log = logging.getLogger(__name__)

NUM_THREADS = 4
HANGS_AFTER_S = 30.0  # a call that takes longer may never end
MAX_CALL_S = 60.0  # after which nobody waits for it
MAX_EXIT_S = 5.0  # for calls in progress at the end; those that hang are left

Result = TypeVar("Result")


class FolderThreads:
    """Runs each call on a thread of its own, and a few at a time. Only the asyncio thread uses it.

    A call cannot be interrupted: its thread counts until it ends, also if nobody waits for it.
    Its caller waits for `max_call_s` at most. While all threads hang, further calls are refused.
    """

    def __init__(
        self,
        num_threads: int = NUM_THREADS,
        *,
        hangs_after_s: float = HANGS_AFTER_S,
        max_call_s: float = MAX_CALL_S,
        max_exit_s: float = MAX_EXIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_threads = num_threads
        self._hangs_after_s = hangs_after_s
        self._max_call_s = max_call_s
        self._max_exit_s = max_exit_s
        self._clock = clock
        self._free = asyncio.Semaphore(num_threads)
        self._began_s: dict[Thread, float] = {}  # of calls in progress

    def close(self) -> None:
        """Wait for calls in progress, but not for those that hang."""
        ends_s = time.monotonic() + self._max_exit_s
        for thread in self._began_s:
            thread.join(max(0.0, ends_s - time.monotonic()))
        num_hanging = sum(thread.is_alive() for thread in self._began_s)
        if num_hanging:
            log.warning("%d threads still wait for files of adapters", num_hanging)

    async def run(self, call: Callable[[], Result]) -> Result:
        """Run a call, in its turn. Raises what it raises, and AdaptersBusy if it or all hang."""
        await self._take_thread()
        loop, result = asyncio.get_running_loop(), Future[Result]()
        result.set_running_or_notify_cancel()  # from now on it cannot be cancelled

        def work() -> None:
            end: Callable[[], None]
            try:
                end = partial(result.set_result, call())
            except BaseException as error:  # noqa: BLE001 - `run` raises it
                end = partial(result.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed
                # First, since who learns that the call has ended may make the next one.
                loop.call_soon_threadsafe(self._note_end, thread)
                end()

        thread = Thread(target=work, name="adapters", daemon=True)
        self._began_s[thread] = self._clock()
        thread.start()
        try:
            async with asyncio.timeout(self._max_call_s) as timer:
                return await asyncio.wrap_future(result)
        except TimeoutError:
            if not timer.expired():
                raise
            raise AdaptersBusy(
                f"files of the adapter did not answer within {self._max_call_s:g} s: check the "
                "file systems of --lora-root and --lora"
            ) from None

    async def _take_thread(self) -> None:
        while self._free.locked():
            last_s = max(self._began_s.values(), default=self._clock())
            patience_s = last_s + self._hangs_after_s - self._clock()
            if patience_s <= 0:
                raise AdaptersBusy(
                    f"all {self._num_threads} threads of this node that read adapters have waited "
                    f"for files for more than {self._hangs_after_s:g} s: check whether the file "
                    "systems of --lora-root and --lora answer"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._free.acquire()
                    return
        await self._free.acquire()

    def _note_end(self, thread: Thread) -> None:
        del self._began_s[thread]
        self._free.release()
