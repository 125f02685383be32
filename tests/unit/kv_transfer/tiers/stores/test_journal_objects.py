"""Journals of living, quiet and frozen processes in an object store."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.kv_transfer.tiers.stores.objects.journal_objects import (
    CLEARED,
    JOURNAL_AGE_S,
    JournalObjects,
)
from baton.kv_transfer.tiers.stores.stored_blocks import REMOVED, WRITTEN
from tests.support.memory_objects import MemoryObjects


@dataclass
class Bucket:
    """A bucket whose clock is that of all processes."""

    objects: MemoryObjects = field(default_factory=MemoryObjects)

    def open(self) -> JournalObjects:
        """Start a process: it lists the blocks, and skips the changes so far."""
        journals = JournalObjects(self.objects, "journals/", lambda: self.objects.changed_s)
        journals.skip()
        return journals

    def wait(self, seconds: float) -> None:
        self.objects.changed_s += seconds


def note(journals: JournalObjects, *changes: str) -> None:
    for change in changes:
        journals.note(change[:1], change[1:])
    journals.publish()


def test_the_journal_of_an_idle_process_is_kept() -> None:
    bucket = Bucket()
    one = bucket.open()
    note(one, "+a")
    for _ in range(30):
        bucket.wait(JOURNAL_AGE_S / 10)
        one.publish()

    third = bucket.open()
    assert len(bucket.objects.content) == 1
    note(one, "+b")
    assert list(third.read()) == [(WRITTEN, "b")]


def test_old_changes_of_a_resumed_process_are_not_repeated() -> None:
    bucket = Bucket()
    one = bucket.open()
    note(one, "+a", "-b", CLEARED)
    bucket.wait(2 * JOURNAL_AGE_S)
    third = bucket.open()
    assert not bucket.objects.content

    note(one, "-c")

    assert list(third.read()) == [(REMOVED, "c")]
