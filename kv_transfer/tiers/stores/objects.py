"""The border to object stores: S3, or memory in tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    num_bytes: int
    changed_s: float  # seconds since the epoch, by the store's clock
    version: str  # another one after each write


class Objects(Protocol):
    """An object store. Thread-safe. Each call ends within a deadline, or raises OSError."""

    def get(self, key: str, max_bytes: int) -> memoryview | None:
        """Return the bytes of an object; None, unread, if there are more than `max_bytes`.

        Raises FileNotFoundError if there is no object.
        """
        ...

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write an object from its parts, as a whole."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. One that is not there is no error."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[list[ObjectInfo]]:
        """Return the objects under a prefix, page by page, in the order of their keys.

        The prefix ends with a slash. Only keys greater than `after` are returned.
        """
        ...
