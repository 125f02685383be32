"""Changes of blocks in a folder, which processes publish for each other in files.

Each process appends its changes to a file, and begins another one when that is long. While it runs,
it shows that its journal is in use; journals that are old are deleted. A process that has not read
for long may have missed some, and must look for the blocks themselves.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

MAX_JOURNAL_BYTES = 1 << 20  # then a process begins another journal
BEAT_S = 30.0  # interval at which a process shows that its journal is in use
JOURNAL_AGE_S = 600.0  # older ones are continued in others, or of processes that have ended
MAX_READ_PAUSE_S = JOURNAL_AGE_S / 2
JOURNAL = re.compile(r"\d+-[0-9a-f]{8}(\.\d{8})?")  # name of one


def is_in_use(folder: Path, now_s: float) -> bool:
    """Return whether a running process has a journal in the folder."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.stat().st_mtime > now_s - JOURNAL_AGE_S:
                    return True
    return False


class JournalFiles:
    """One thread uses it."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self.process = f"{os.getpid()}-{secrets.token_hex(4)}"  # unique
        self._folder = folder
        self._clock = clock
        self._numbers = count()
        self._own = self._folder / self.process
        self._unwritten = b""  # changes that could not be written so far
        self._offsets: dict[str, int] = {}  # bytes read of the others' journals
        self._beat_at_s = self._read_s = float("-inf")

    def open(self) -> None:
        """Begin the own journal, and skip what others have written."""
        self._begin()
        self.skip()

    def note(self, sign: str, stem: str) -> None:
        """Note that a block was written or removed. If that fails, it is repeated later."""
        self._unwritten += f"{sign}{stem}\n".encode()
        self._publish()

    @property
    def is_behind(self) -> bool:
        """True if changes may have been deleted before they were read."""
        return self._clock() - self._read_s > MAX_READ_PAUSE_S

    def skip(self) -> None:
        """Skip the changes so far."""
        self._offsets = self._sizes_of_others()
        self._read_s = self._clock()

    def read(self) -> list[tuple[str, str]]:
        """Return the changes by other processes since the last call: sign and stem."""
        self._folder.mkdir(exist_ok=True)  # someone may have emptied the folder
        changes: list[tuple[str, str]] = []
        offsets: dict[str, int] = {}
        for name, num_bytes in self._sizes_of_others().items():
            with suppress(FileNotFoundError):  # it was old, and is deleted
                offsets[name], lines = self._read_lines(name, num_bytes)
                changes += [(line[:1], line[1:]) for line in lines]
        self._offsets = offsets
        self._read_s = self._clock()
        return changes

    def keep(self) -> None:
        """Write what could not be written, keep the own journal, and delete old ones."""
        self._publish()
        if self._clock() < self._beat_at_s:
            return
        self._beat_at_s = self._clock() + BEAT_S
        try:
            os.utime(self._own)
        except FileNotFoundError:
            self._begin()
        oldest_s = self.now() - JOURNAL_AGE_S
        for path in list(self._folder.iterdir()):
            with suppress(FileNotFoundError):  # another process has just deleted it
                if path.stat().st_mtime < oldest_s:
                    path.unlink()

    def now(self) -> float:
        """Return the time of the last beat, by the clock of the file system.

        Hosts that share a folder may have other clocks. Raises OSError without a journal.
        """
        return self._own.stat().st_mtime

    def _begin(self) -> None:
        """Begin a journal whose name was never used: others know how far they have read one."""
        self._folder.mkdir(exist_ok=True)
        self._own = self._folder / f"{self.process}.{next(self._numbers):08}"
        self._own.touch()

    def _publish(self) -> None:
        if not self._unwritten:
            return
        try:
            self._append()
        except FileNotFoundError:  # it was old, or the folder was emptied
            self._begin()
            self._append()

    def _append(self) -> None:
        """Append to the own journal. A line that is written in part is completed later."""
        journal = os.open(self._own, os.O_WRONLY | os.O_APPEND)
        try:
            num_written = os.write(journal, self._unwritten)
            self._unwritten = self._unwritten[num_written:]
            is_long = os.fstat(journal).st_size >= MAX_JOURNAL_BYTES
        finally:
            os.close(journal)
        if is_long and not self._unwritten:
            self._begin()

    def _sizes_of_others(self) -> dict[str, int]:
        """Return the bytes of the others' journals by name, those of each process in order."""
        sizes: dict[str, int] = {}
        for name in sorted(os.listdir(self._folder)):
            if not name.startswith(self.process):
                with suppress(FileNotFoundError):  # it was old, and is deleted
                    sizes[name] = (self._folder / name).stat().st_size
        return sizes

    def _read_lines(self, name: str, num_bytes: int) -> tuple[int, list[str]]:
        """Return how far a journal is read now, and the lines that are new."""
        offset = self._offsets.get(name, 0)
        if num_bytes == offset:
            return offset, []
        with (self._folder / name).open("rb") as file:
            file.seek(offset)
            text = file.read()
        whole = text.rfind(b"\n") + 1  # a line may be written in part
        return offset + whole, text[:whole].decode(errors="replace").splitlines()
