"""An object store in memory, which tests make unreachable or slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock

from baton.kv_transfer.tiers.stores.objects.objects import ObjectInfo, Objects

PAGE_OBJECTS = 3  # small, so that a few objects take several pages


def _no_fault(_: str) -> None:
    pass


@dataclass
class MemoryObjects:
    """Implements Objects. `before` is called with the name of each operation and may raise."""

    content: dict[str, bytes] = field(default_factory=dict)
    before: Callable[[str], None] = _no_fault
    changed_s: float = 1000.0  # of what is written now
    _lock: Lock = field(default_factory=Lock)
    _infos: dict[str, ObjectInfo] = field(default_factory=dict)
    _num_writes: int = 0

    def get(self, key: str, max_bytes: int) -> memoryview | None:
        self.before("get")
        with self._lock:
            if key not in self.content:
                raise FileNotFoundError(key)
            content = self.content[key]
        return memoryview(content) if len(content) <= max_bytes else None

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        self.before("put")
        content = b"".join(parts)
        with self._lock:
            self._num_writes += 1
            self.content[key] = content
            version = str(self._num_writes)
            self._infos[key] = ObjectInfo(key, len(content), self.changed_s, version)

    def delete(self, keys: Sequence[str]) -> None:
        self.before("delete")
        with self._lock:
            for key in keys:
                self.content.pop(key, None)
                self._infos.pop(key, None)

    def list(self, prefix: str, after: str = "") -> Iterator[list[ObjectInfo]]:
        """Like a real store, a page has what is there when it is requested."""
        assert prefix.endswith("/"), "S3 compares whole path segments"
        while True:
            self.before("list")
            with self._lock:
                keys = sorted(key for key in self._infos if key.startswith(prefix) and key > after)
                page = [self._infos[key] for key in keys[:PAGE_OBJECTS]]
            if not page:
                return
            yield [
                ObjectInfo(each.key, len(self.content.get(each.key, b"")), *_rest(each))
                for each in page
            ]
            after = page[-1].key


def _rest(info: ObjectInfo) -> tuple[float, str]:
    return info.changed_s, info.version


@dataclass
class FaultyObjects:
    """Implements Objects. On order, deletes fail, or all operations after a change."""

    objects: Objects
    is_failing: bool = False
    has_deletes: bool = True

    def get(self, key: str, max_bytes: int) -> memoryview | None:
        content = self.objects.get(key, max_bytes)
        self._fail()
        return content

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        self.objects.put(key, parts)
        self._fail()

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; the first half, if changes fail."""
        if not self.has_deletes:
            raise OSError("failed to delete")
        self.objects.delete(keys[: (len(keys) + 1) // 2] if self.is_failing else keys)
        self._fail()

    def list(self, prefix: str, after: str = "") -> Iterator[list[ObjectInfo]]:
        for page in self.objects.list(prefix, after):
            yield page
            self._fail()

    def _fail(self) -> None:
        if self.is_failing:
            raise OSError("failed after a change")
