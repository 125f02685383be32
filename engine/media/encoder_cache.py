"""Encodings of pictures that the runner has in memory. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from baton.engine.errors import EncodingsUnaccounted, OutOfOrder


class EncoderCache:
    """Digests of encodings, with their sizes in rows: one for each placeholder token.

    Its size is limited. An encoding that no request uses stays until another needs its room; the
    one that was used least recently goes first.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_used_rows = 0
        self.total_hits = 0
        self._rows: dict[bytes, int] = {}  # the least recently used first
        self._freed: list[bytes] = []

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    def has_room(self, added: Mapping[bytes, int], used: Collection[bytes]) -> bool:
        """Return whether these fit, if all others but the `used` ones go."""
        num_kept = sum(self._rows[digest] for digest in used if digest in self._rows)
        return num_kept + sum(added.values()) <= self.num_rows

    def add(self, digest: bytes, num_rows: int, used: Collection[bytes]) -> None:
        """Add an encoding for which there is room, in place of others that are not `used`."""
        for other in [each for each in self._rows if each not in used]:
            if self.num_used_rows + num_rows <= self.num_rows:
                break
            self.drop(other)
        if self.num_used_rows + num_rows > self.num_rows:
            raise OutOfOrder(f"there is no room for an encoding of {num_rows} rows")
        self._rows[digest] = num_rows
        self.num_used_rows += num_rows

    def touch(self, digest: bytes) -> None:
        """Note the use of an encoding by one more request."""
        self._rows[digest] = self._rows.pop(digest)
        self.total_hits += 1

    def drop(self, digest: bytes) -> None:
        """Remove an encoding, if it is here."""
        num_rows = self._rows.pop(digest, None)
        if num_rows is not None:
            self.num_used_rows -= num_rows
            self._freed.append(digest)

    def clear(self, used: Collection[bytes]) -> None:
        """Remove all encodings that are not `used`."""
        for digest in [each for each in self._rows if each not in used]:
            self.drop(digest)

    def take_freed(self) -> tuple[bytes, ...]:
        """Return the encodings that the runner can forget, since the last call."""
        freed, self._freed = tuple(self._freed), []
        return freed

    def check(self, used: Collection[bytes]) -> None:
        """Raise EncodingsUnaccounted unless the sizes add up and all `used` ones are here."""
        num_rows = sum(self._rows.values())
        if num_rows != self.num_used_rows or num_rows > self.num_rows:
            raise EncodingsUnaccounted(
                f"encodings of {num_rows} rows; {self.num_used_rows} are counted, and "
                f"{self.num_rows} fit"
            )
        missing = [digest for digest in used if digest not in self._rows]
        if missing:
            raise EncodingsUnaccounted(f"{len(missing)} encodings in use are not in the cache")
