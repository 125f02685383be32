"""Calendar of steps: what is due in which one. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class StepCalendar(Generic[Entry]):
    """Entries by the step in which they are due.

    Decoding requests need something, such as a block, only every few steps. With a calendar, they
    cost no work in the steps between. Entries are never removed: whoever takes them skips those of
    requests that have left.
    """

    def __init__(self) -> None:
        self.step = 0  # the last one that has begun; they are numbered from one
        self._entries: dict[int, list[Entry]] = {}

    def begin_step(self) -> list[Entry]:
        """Begin the next step. Returns its entries in the order in which they were added."""
        self.step += 1
        return self._entries.pop(self.step, [])

    def next_entries(self) -> list[Entry]:
        """Return the entries of the next step, which does not begin."""
        return self._entries.get(self.step + 1, [])

    def add(self, step: int, entry: Entry) -> None:
        """Add an entry that is due in a later step."""
        self._entries.setdefault(step, []).append(entry)
