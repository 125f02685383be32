"""Hash table from 64-bit keys to small numbers, for many keys at once. Pure.

Keys must be random, such as hashes: of each, 40 bits are stored and choose its slot. So of a
hundred million keys that are stored, one in ten thousand others seems to be there.

A call costs about as much as a few memory accesses for each key, whatever the size of the table:
it grows by preparing and then moving a part in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.uint32]
SlotIndices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
# Receives entries that move to a new table, each of them once; returns which of them to keep.
Keep = Callable[[Keys, Numbers], Flags]

NUMBER_BITS = np.uint64(24)
MAX_NUMBER = (1 << 24) - 1
WORD_BITS = 64
PAGE_SLOTS = 512
MIN_SLOTS = 1024
MAX_LOAD = 0.75
FEW_KEYS = 16  # so few are found faster one by one
PREPARE_LOAD = 0.6  # from here on, memory of the next table is prepared
# For each key that is stored. The next table is ready before this one is full, and everything has
# been moved to it before it is full itself.
PREPARED_PER_KEY = 16
MOVED_PER_KEY = 3


class Found(NamedTuple):
    """Keys that were looked up, and their numbers; 0 for keys that are not stored."""

    keys: Keys
    numbers: Numbers
    at: SlotIndices
    is_stored: Flags  # in the current table

    def only(self, these: Flags) -> Found:
        return Found(self.keys[these], self.numbers[these], self.at[these], self.is_stored[these])


class _Slots:
    """Table of a fixed size, with open addressing and double hashing.

    The first bits of a key choose its slot: sorted keys are found in the order of memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._shift = np.uint64(WORD_BITS + 1 - size.bit_length())
        self.entries = _zeros(size)  # a key with its number; 0: free
        self.num_used = 0
        self._num_prepared = 0

    def prepare(self, num_slots: int) -> None:
        """Access the next slots for the first time, which takes far longer than later accesses."""
        end = min(self.size, self._num_prepared + num_slots)
        self.entries[self._num_prepared : end : PAGE_SLOTS] = 0
        self._num_prepared = end

    def prepare_rest(self) -> None:
        self.prepare(self.size - self._num_prepared)

    def find(self, keys: Keys) -> Found:
        """Find the slot of each key, or else the free one for it."""
        at = (keys >> self._shift).view(np.int64)
        entries = self.entries[at]
        pending = np.flatnonzero((entries != 0) & ((entries ^ keys) >> NUMBER_BITS != 0))
        while len(pending) > FEW_KEYS:
            these = keys[pending]
            steps = (these >> NUMBER_BITS | np.uint64(1)).view(np.int64)
            tried = (at[pending] + steps) & (self.size - 1)
            at[pending] = tried
            stored = self.entries[tried]
            entries[pending] = stored
            pending = pending[(stored != 0) & ((stored ^ these) >> NUMBER_BITS != 0)]
        for place in pending.tolist():
            at[place], entries[place] = self._find_one(int(keys[place]), int(at[place]))
        return Found(keys, _numbers(entries), at, entries != 0)

    def _find_one(self, key: int, at: int) -> tuple[int, int]:
        """Return the slot of a key, or else the free one for it, after `at`, and its entry."""
        last, number_bits = self.size - 1, int(NUMBER_BITS)
        step = key >> number_bits | 1
        while True:
            at = (at + step) & last
            entry = self.entries.item(at)
            if not entry or not (entry ^ key) >> number_bits:
                return at, entry

    def put(self, found: Found, numbers: Numbers) -> None:
        """Store numbers of keys that differ from each other, and were just found."""
        keys, at = found.keys, found.at
        self.num_used += int(np.count_nonzero(~found.is_stored))
        while True:
            entries = keys | numbers
            self.entries[at] = entries
            # Several keys can have found the same free slot: one of them gets it.
            is_lost = self.entries[at] != entries
            if not is_lost.any():
                return
            keys, numbers = keys[is_lost], numbers[is_lost]
            at = self.find(keys).at


class KeyTable:
    """Table that grows, and leaves out the entries that are not to be kept when it does."""

    def __init__(self, keep: Keep, count_kept: Callable[[], int]) -> None:
        self._keep = keep
        self._count_kept = count_kept
        self._slots = _Slots(MIN_SLOTS)
        self._slots.prepare_rest()
        self._next: _Slots | None = None  # prepared for growth
        self._old: _Slots | None = None  # moved to the current one
        self._num_moved = 0  # slots of the old table

    @property
    def num_bytes(self) -> int:
        tables = [self._slots, self._next, self._old]
        return sum(table.entries.nbytes for table in tables if table is not None)

    def get(self, keys: Keys) -> Numbers:
        """Return the numbers of keys; 0 for those that are not stored."""
        return self._find(keys).numbers

    def look_up(self, keys: Keys) -> Found:
        """Look up keys, which must differ from each other, to `put` numbers of them next."""
        self._move(MOVED_PER_KEY * len(keys))
        self._prepare(len(keys))
        return self._find(keys)

    def put(self, found: Found, numbers: Numbers) -> None:
        """Store numbers of keys of the last `look_up`."""
        self._slots.put(found, numbers)

    def _find(self, keys: Keys) -> Found:
        found = self._slots.find(keys)
        if self._old is not None:
            missing = np.flatnonzero(~found.is_stored)
            found.numbers[missing] = self._old.find(keys[missing]).numbers
        return found

    def _prepare(self, num_coming: int) -> None:
        """Make room for keys. The next table is prepared in parts, and then replaces this one."""
        num_used = self._slots.num_used + num_coming
        if num_used <= PREPARE_LOAD * self._slots.size:
            return
        # The keys that come until everything has been moved must fit, too.
        num_growing = num_coming + self._slots.size // 2
        if self._next is None:
            self._next = self._larger(num_growing)
        self._next.prepare(PREPARED_PER_KEY * num_coming)
        if num_used > MAX_LOAD * self._slots.size:
            # This batch can be far larger than those that the next table was made for.
            num_growing = num_coming + self._slots.size // MOVED_PER_KEY
            if not self._fits(num_growing, self._next.size):
                self._next = self._larger(num_growing)
            self._next.prepare_rest()
            self._move(self._slots.size)  # what is left, if the last batches were large
            self._old, self._slots, self._next, self._num_moved = self._slots, self._next, None, 0
            self._move(MOVED_PER_KEY * num_coming)

    def _larger(self, num_growing: int) -> _Slots:
        """Return a table for the entries that are kept now and as many more."""
        size = self._slots.size
        while not self._fits(num_growing, size):
            size *= 2
        return _Slots(size)

    def _fits(self, num_growing: int, size: int) -> bool:
        return self._count_kept() + num_growing <= MAX_LOAD * size

    def _move(self, num_slots: int) -> None:
        """Move the next part of the old table, but for keys that the current one has."""
        old = self._old
        if old is None:
            return
        part = old.entries[self._num_moved : self._num_moved + num_slots]
        entries = part[part != 0]
        found = self._slots.find(as_keys(entries))
        is_moved = ~found.is_stored
        found, numbers = found.only(is_moved), _numbers(entries[is_moved])
        is_kept = self._keep(found.keys, numbers)
        self._slots.put(found.only(is_kept), numbers[is_kept])
        # The owner may use the numbers of entries that are left out again.
        part &= ~np.uint64(MAX_NUMBER)
        self._num_moved += num_slots
        if self._num_moved >= old.size:
            self._old = None


def _zeros(size: int) -> Keys:
    """Return zeros in small pages: the first access to a huge page can take milliseconds."""
    memory = mmap(-1, size * np.uint64().itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint64)


def _numbers(entries: Keys) -> Numbers:
    return (entries & np.uint64(MAX_NUMBER)).astype(np.uint32)


def as_keys(words: Keys) -> Keys:
    """Clear the bits of numbers. 0 would be a free slot."""
    keys = words & ~np.uint64(MAX_NUMBER)
    keys[keys == 0] = np.uint64(1 << 63)
    return keys
