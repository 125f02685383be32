"""First access to the pages of host memory, in the background, a little ahead of their use.

The kernel maps a page, and fills it with zeros, when it is first written to: the first copy into a
block takes many times as long as later ones. A thread of the lowest priority has this done before
blocks are stored. It changes no content, so it needs no lock against the copies.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable

from baton.kv_transfer.tiers.block_memory import BlockMemory
from baton.kv_transfer.tiers.copy_pace import PACED_BYTES, CopyPace, PacedWork
from baton.kv_transfer.tiers.host_size import STEP_BYTES

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap
LOWEST_PRIORITY = 19


class FirstTouch:
    """Use it as a context manager: it ends its thread."""

    def __init__(
        self, memory: BlockMemory, pace: CopyPace, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pace = pace
        self._clock = clock  # that of the pace
        self._memory = memory
        # Whole pages only. Slots are used from the first one on, so the thread stays ahead of them.
        self._next = -(-memory.address // mmap.PAGESIZE) * mmap.PAGESIZE
        self._end = self._page_end(memory.num_blocks * memory.block_bytes)
        self._allowed_end = self._next
        self._changed = threading.Condition()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="kv-first-touch", daemon=True)

    def __enter__(self) -> FirstTouch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_ending.set()
            self._changed.notify()
        self._pace.recheck_rests()
        self._thread.join()

    def allow(self, num_blocks: int) -> None:
        """Map the pages of so many blocks, and of the step after them."""
        ahead_end = self._page_end(num_blocks * self._memory.block_bytes + STEP_BYTES)
        with self._changed:
            self._allowed_end = min(self._end, ahead_end)
            self._changed.notify()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all pages are mapped. Returns whether they are, or cannot be."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _touch(self) -> None:
        # On Linux this is the priority of the thread alone.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        madvise = ctypes.CDLL(None, use_errno=True).madvise  # lets other threads run meanwhile
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while self._next < self._end and self._wait_for_work():
            num_bytes = min(PACED_BYTES, self._allowed_end - self._next)
            with self._pace.turn(PacedWork.TOUCH, self._clock(), self._is_ending.is_set):
                failed = madvise(self._next, num_bytes, MADV_POPULATE_WRITE)
            if failed:  # an older kernel: pages are mapped by the first copies, as ever
                logger.debug("pages are not mapped ahead: %s", os.strerror(ctypes.get_errno()))
                return
            self._next += num_bytes

    def _wait_for_work(self) -> bool:
        """Wait until more pages are to be mapped. Returns False if the thread ends instead."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._next < self._allowed_end or self._is_ending.is_set()
            )
        return not self._is_ending.is_set()

    def _page_end(self, num_bytes: int) -> int:
        return (self._memory.address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
