"""Host memory of tiers: its size, growth, and the first access to its pages.

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

from baton.kv_transfer.tiers.copy_pace import PACED_BYTES, CopyPace, PacedWork
from baton.kv_transfer.tiers.kv_access import BlockMemory

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap
LOWEST_PRIORITY = 19
MAX_CACHES = 8  # times the KV cache
SHARE = 0.5  # of the node's part of the memory that is free, without its KV cache
MIN_BYTES = 64 << 20
MIN_FREE_SHARE = 0.125  # of the memory that was free at the start: with less, nothing grows
STEP_BYTES = 64 << 20
RETRY_S = 5.0


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


def auto_host_bytes(spare_bytes: int, kv_bytes: int) -> int:
    """Return the bound of the host tier below a KV cache of `kv_bytes`.

    `spare_bytes` is what is left of the node's part of the memory once its KV cache is full.
    """
    return min(max(int(spare_bytes * SHARE), MIN_BYTES), MAX_CACHES * kv_bytes)


class HostGrowth:
    """Lets a host tier use its memory step by step. The kernel allocates it at the first use."""

    def __init__(
        self,
        memory: BlockMemory,
        has_room: Callable[[], bool] = lambda: True,
        step_bytes: int = STEP_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """After the first step, the tier grows only while `has_room`."""
        self.num_blocks = 0  # that may be used
        self._max_blocks = memory.num_blocks
        self._step_blocks = max(1, step_bytes // memory.block_bytes)
        self._has_room = has_room
        self._clock = clock
        self._retry_s = float("-inf")

    def grow(self) -> range:
        """Return the blocks of the next step; none at the bound, or while memory is short."""
        first = self.num_blocks
        if first == self._max_blocks or self._clock() < self._retry_s:
            return range(0)
        if first and not self._has_room():
            self._retry_s = self._clock() + RETRY_S
            return range(0)
        self.num_blocks = min(self._max_blocks, first + self._step_blocks)
        return range(first, self.num_blocks)
