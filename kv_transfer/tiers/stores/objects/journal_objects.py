"""Changes of blocks in an object store, which processes publish for each other.

Each process has one small object with its latest changes and their number, and rewrites it when
there are more. A process that reads too late misses some, and then knows less than there is, or
looks for what is gone.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Lock

from baton.kv_transfer.tiers.stores.objects.objects import ObjectInfo, Objects

CLEARED = "*"  # a change besides those of single blocks
MAX_CHANGES = 4096
MAX_JOURNAL_BYTES = MAX_CHANGES << 8  # larger objects are not ours, and are not read
JOURNAL_AGE_S = 86_400.0  # older ones are of processes that have ended, and are deleted
BEAT_S = 3600.0  # a process that runs writes its journal at least as often


class JournalObjects:
    """One thread uses it; `note` may be called from any."""

    def __init__(self, objects: Objects, prefix: str, wall_clock: Callable[[], float]) -> None:
        self._objects = objects
        self._prefix = prefix
        self._own_key = f"{prefix}{secrets.token_hex(8)}"
        self._wall_clock = wall_clock
        self._lock = Lock()
        self._changes: deque[str] = deque(maxlen=MAX_CHANGES)
        self._num_changes = self._num_published = 0
        self._beat_at_s = float("inf")  # there is no journal yet
        self._versions: dict[str, str] = {}  # of the others' journals, as they were read
        self._num_read: dict[str, int] = {}  # changes, by journal

    def note(self, sign: str, stem: str = "") -> None:
        """Note that a block was written or removed, or that all were."""
        with self._lock:
            self._changes.append(sign + stem)
            self._num_changes += 1

    def publish(self) -> None:
        """Write the own journal, if there are new changes or it would become old."""
        with self._lock:
            number, changes = self._num_changes, list(self._changes)
        now_s = self._wall_clock()
        if number == self._num_published and now_s < self._beat_at_s:
            return
        self._objects.put(self._own_key, ["\n".join([str(number), *changes]).encode()])
        self._num_published, self._beat_at_s = number, now_s + BEAT_S

    def skip(self) -> None:
        """Skip the changes so far."""
        for _ in self.read():
            pass

    def read(self) -> Iterator[tuple[str, str]]:
        """Return the changes by other processes since the last call: sign and stem."""
        for page in self._objects.list(self._prefix):
            for info in page:
                if info.key != self._own_key and self._versions.get(info.key) != info.version:
                    for change in self._changes_in(info):
                        yield change[:1], change[1:]

    def _changes_in(self, info: ObjectInfo) -> list[str]:
        is_old = info.changed_s < self._wall_clock() - JOURNAL_AGE_S
        new = []
        with suppress(FileNotFoundError, ValueError):  # deleted meanwhile, or not ours
            content = self._objects.get(info.key, MAX_JOURNAL_BYTES) or b""
            number, *changes = bytes(content).decode().split("\n")
            num_new = int(number) - self._num_read.get(info.key, 0)
            new = changes[-num_new:] if num_new > 0 and not is_old else []
            self._num_read[info.key] = int(number)  # of old ones, too: their writer may return
        self._versions[info.key] = info.version
        if is_old:
            self._objects.delete([info.key])
        return new
