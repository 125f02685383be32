"""Cached prefixes of a node, sent to watchers as changes or as snapshots. Pure.

A name is there while the block is in the prefix cache, in the node's host memory tier, or in both.

The log of changes is kept no longer than the set of names. A watcher that starts late or falls
behind receives a snapshot. Changes that cancel each other out are not sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from baton.engine.kv_cache.block_hashes import HASH_BYTES, BlockHash
from baton.kv_transfer.external_kv import NO_HELD_CHANGES, HeldChanges

# Minimum length of the log, for small caches.
MIN_LOG_LEN = 256
# Names in one update. Larger changes are split, so that none holds up a router's other work.
MAX_NAMES = 4096
# Places of a block, as bits.
IN_CACHE, IN_HOST = 1, 2


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """One update to a watcher, with the names packed."""

    sequence: int
    is_snapshot: bool  # replaces what the watcher knows; further names follow as changes
    stored: bytes
    removed: bytes = b""


class PrefixGap(Exception):
    """A watcher missed updates, so its view of the node's prefixes is wrong."""


class CachedPrefixes:
    """Names of the blocks that the node has, with a log of changes."""

    def __init__(self) -> None:
        self._places: dict[BlockHash, int] = {}  # of each name, never 0
        self._log: deque[tuple[BlockHash, bool]] = deque()  # the name, and True if it was added
        self._version = 0  # of the state after the log's last entry
        self._oldest_version = 0  # of the state before the log's first entry

    @property
    def names(self) -> frozenset[BlockHash]:
        return frozenset(self._places)

    @property
    def version(self) -> int:
        return self._version

    def take(self, events: Iterable[KvEvent], host: HeldChanges = NO_HELD_CHANGES) -> None:
        """Apply events of the prefix cache, and changes of the names in host memory."""
        for event in events:
            match event:
                case BlockStored():
                    self._add(event.block_hashes, IN_CACHE)
                case BlockRemoved():
                    self._remove(event.block_hashes, IN_CACHE)
                case AllBlocksCleared():
                    self._clear_cache()
        self._add(map(BlockHash, host.added), IN_HOST)
        self._remove(map(BlockHash, host.removed), IN_HOST)
        self._trim_log()

    def since(self, version: int) -> tuple[set[BlockHash], set[BlockHash]] | None:
        """Return names added and removed since `version`; None if the log does not reach back."""
        if version < self._oldest_version:
            return None
        was_there: dict[BlockHash, bool] = {}
        for name, is_new in islice(self._log, version - self._oldest_version, None):
            was_there.setdefault(name, not is_new)
        stored = {name for name, was in was_there.items() if not was and name in self._places}
        removed = {name for name, was in was_there.items() if was and name not in self._places}
        return stored, removed

    def _add(self, names: Iterable[BlockHash], place: int) -> None:
        for name in names:
            places = self._places.get(name, 0)
            self._places[name] = places | place
            if not places:
                self._log_change(name, is_new=True)

    def _remove(self, names: Iterable[BlockHash], place: int) -> None:
        for name in names:
            places = self._places.get(name, 0)
            if places & ~place:
                self._places[name] = places & ~place
            elif places:
                del self._places[name]
                self._log_change(name, is_new=False)

    def _log_change(self, name: BlockHash, *, is_new: bool) -> None:
        self._log.append((name, is_new))
        self._version += 1

    def _clear_cache(self) -> None:
        in_host = (name for name, places in self._places.items() if places & IN_HOST)
        self._places = dict.fromkeys(in_host, IN_HOST)
        self._log.clear()
        self._version += 1
        self._oldest_version = self._version

    def _trim_log(self) -> None:
        longest = max(MIN_LOG_LEN, len(self._places))
        while len(self._log) > longest:
            self._log.popleft()
            self._oldest_version += 1


class PrefixWatcher:
    """Position of one watcher in the changes."""

    def __init__(self, cached: CachedPrefixes) -> None:
        self._cached = cached
        self._version = -1
        self._sequence = 0
        self._parts: Iterator[PrefixChanges] = iter(())  # of changes that were split

    def next(self) -> PrefixChanges | None:
        """Return the watcher's next update, or None if nothing has changed."""
        part = next(self._parts, None)
        if part is not None or self._version == self._cached.version:
            return part
        changes = self._cached.since(self._version)
        self._version = self._cached.version
        if changes is None:
            self._parts = self._split(pack_names(self._cached.names), b"", is_snapshot=True)
        else:
            stored, removed = map(pack_names, changes)
            self._parts = self._split(stored, removed, is_snapshot=False)
        return next(self._parts, None)

    def _split(
        self, stored: bytes, removed: bytes, *, is_snapshot: bool
    ) -> Iterator[PrefixChanges]:
        size = MAX_NAMES * HASH_BYTES
        while stored or removed or is_snapshot:
            self._sequence += 1
            yield PrefixChanges(self._sequence, is_snapshot, stored[:size], removed[:size])
            stored, removed, is_snapshot = stored[size:], removed[size:], False


def pack_names(names: Iterable[BlockHash]) -> bytes:
    return b"".join(names)


def unpack_names(packed: bytes) -> frozenset[BlockHash]:
    starts = range(0, len(packed), HASH_BYTES)
    return frozenset(BlockHash(packed[start : start + HASH_BYTES]) for start in starts)
