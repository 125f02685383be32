"""Names of blocks that are ordered to be dropped, and may still be stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from threading import Lock

from baton.core.ids import BlockName


class DroppedNames:
    """Thread-safe. A name is in it until each of its drops has ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_drops: Counter[BlockName] = Counter()

    def __contains__(self, name: BlockName) -> bool:
        return name in self._num_drops

    def begin(self, names: Iterable[BlockName]) -> None:
        with self._lock:
            self._num_drops.update(names)

    def end(self, names: Iterable[BlockName]) -> None:
        with self._lock:
            for name in names:
                self._num_drops[name] -= 1
                if not self._num_drops[name]:
                    del self._num_drops[name]
