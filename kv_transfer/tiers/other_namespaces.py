"""Blocks of other models and versions in a KV folder, which count in the size of the folder.

Each model, layout and version has a namespace, a subfolder of its own. If no process uses it any
more, its files are deleted when their room is needed, the least recently used ones first. Until
then they stay: a rollback finds them again.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kv_transfer.tiers.block_store import block_of
from kv_transfer.tiers.journal_files import JOURNAL_AGE_S, is_in_use

SUFFIX = ".kv"  # of a block's file
PART_SUFFIX = ".part"  # of one that is being written
PREFIX_CHARS = 2  # of a block's name: the subfolder of its file
JOURNALS = "journals"
LIST_PAUSE_S = 60.0  # between two listings
_NAMESPACE = re.compile("[0-9a-f]{32}")
_PREFIX = re.compile(f"[0-9a-f]{{{PREFIX_CHARS}}}")


class _UnusedFile(NamedTuple):
    used_s: float  # in the future: the end of its retention
    path: str
    num_bytes: int


@dataclass(slots=True)
class _Listing:
    num_used: int = 0  # namespaces that processes use
    used_bytes: int = 0  # in these
    unused_bytes: int = 0
    unused: deque[_UnusedFile] = field(default_factory=deque)  # the first one to delete first


class OtherNamespaces:
    """Namespaces next to `own`. One thread uses it. Nothing but files of blocks is deleted."""

    def __init__(self, own: Path) -> None:
        self._own = own
        self._listed = _Listing()
        self._listing = self._list()
        self._next_list_s = float("-inf")

    @property
    def num_used(self) -> int:
        """The number of namespaces that processes use."""
        return self._listed.num_used

    @property
    def used_bytes(self) -> int:
        """Bytes of the files in namespaces that processes use."""
        return self._listed.used_bytes

    @property
    def num_bytes(self) -> int:
        return self._listed.used_bytes + self._listed.unused_bytes

    def list_all(self) -> None:
        """List the files. Raises OSError if that fails."""
        for _ in self._list():
            pass

    def list_some(self, now_s: float) -> None:
        """List the files of one subfolder more: a large folder takes a while."""
        if now_s < self._next_list_s:
            return
        try:
            next(self._listing)
        except StopIteration:
            self._listing = self._list()
            self._next_list_s = now_s + LIST_PAUSE_S

    def make_room(self, max_bytes: int) -> None:
        """Delete unused files until all files take `max_bytes`, as far as there are any."""
        listed = self._listed
        while self.num_bytes > max_bytes and listed.unused:
            file = listed.unused.popleft()
            with suppress(PermissionError):
                with suppress(FileNotFoundError):  # another process has deleted it
                    os.unlink(file.path)
                listed.unused_bytes -= file.num_bytes

    def _list(self) -> Iterator[None]:
        """List the files, with a pause after each subfolder."""
        found = _Listing()
        unused: list[_UnusedFile] = []
        for name, path in _folders(self._own.parent, _NAMESPACE):
            if name != self._own.name:
                yield from _list_namespace(path, found, unused)
        found.unused.extend(sorted(unused))
        self._listed = found


def _list_namespace(path: Path, found: _Listing, unused: list[_UnusedFile]) -> Iterator[None]:
    is_used = is_in_use(path / JOURNALS, time.time())
    found.num_used += is_used
    num_files = 0
    for _, folder in _folders(path, _PREFIX):
        for file in _files(folder):
            num_files += 1
            if is_used:
                found.used_bytes += file.num_bytes
            else:
                found.unused_bytes += file.num_bytes
                unused.append(file)
        yield
    if not (is_used or num_files):
        _remove_empty(path)


def _folders(parent: Path, pattern: re.Pattern[str]) -> list[tuple[str, Path]]:
    try:
        with os.scandir(parent) as entries:
            return [
                (entry.name, Path(entry.path))
                for entry in entries
                if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []


def _files(folder: Path) -> Iterator[_UnusedFile]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(ValueError, FileNotFoundError):  # not ours, or just deleted
                if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                    block_of(entry.name.removesuffix(SUFFIX))
                    facts = entry.stat(follow_symlinks=False)
                    yield _UnusedFile(facts.st_mtime, entry.path, facts.st_size)


def _remove_empty(path: Path) -> None:
    """Remove a namespace without blocks. What is not ours in it stays, and so does the folder."""
    with suppress(OSError):
        if path.stat().st_mtime > time.time() - JOURNAL_AGE_S:
            return  # a process may be about to use it
        for journal in (path / JOURNALS).iterdir():
            journal.unlink()
        (path / JOURNALS).rmdir()
    for _, folder in _folders(path, _PREFIX):
        with suppress(OSError):
            for part in folder.glob(f"*{PART_SUFFIX}"):
                part.unlink()
            folder.rmdir()
    with suppress(OSError):
        path.rmdir()
