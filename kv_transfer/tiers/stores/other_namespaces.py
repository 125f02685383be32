"""Blocks of other models and versions in a KV folder, which count in the size of the folder.

Each model, layout and version has a namespace, a subfolder of its own. If no process uses it any
more, its files are deleted when their room is needed, the least recently used ones first. Until
then they stay: a rollback finds them again.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from baton.kv_transfer.tiers.stores.journal_files import JOURNAL, JOURNAL_AGE_S, is_in_use
from baton.kv_transfer.tiers.stores.stored_blocks import block_of

SUFFIX = ".kv"  # of a block's file
PART_SUFFIX = ".part"  # of one that is being written
PREFIX_CHARS = 2  # of a block's name: the subfolder of its file
JOURNALS = "journals"
LIST_PAUSE_S = 60.0  # between two listings
MIN_NAME_BYTES = 16  # of a block
_NAMESPACE = re.compile("[0-9a-f]{32}")
_PART = re.compile(rf".+{re.escape(PART_SUFFIX)}")
_PREFIX = re.compile(f"[0-9a-f]{{{PREFIX_CHARS}}}")


class _UnusedFile(NamedTuple):
    used_s: float  # in the future: the end of its retention
    path: Path
    num_bytes: int

    @property
    def namespace(self) -> Path:
        return self.path.parent.parent


@dataclass(slots=True)
class _Listing:
    used: set[Path] = field(default_factory=set)  # namespaces that processes use
    used_bytes: int = 0  # in these
    unused_bytes: int = 0
    unused: deque[_UnusedFile] = field(default_factory=deque)  # the first one to delete first


class OtherNamespaces:
    """Namespaces next to `own`. One thread uses it.

    Only blocks and journals of this user are deleted. What cannot be read is skipped: it must not
    keep the node from its own blocks. `now` is the clock of the file system.
    """

    def __init__(self, own: Path, now: Callable[[], float]) -> None:
        self._own = own
        self._now = now
        self._listed = _Listing()
        self._listing = self._list()
        self._next_list_s = float("-inf")

    @property
    def num_used(self) -> int:
        return len(self._listed.used)

    @property
    def used_bytes(self) -> int:
        """Bytes of the files in namespaces that processes use."""
        return self._listed.used_bytes

    @property
    def num_bytes(self) -> int:
        return self._listed.used_bytes + self._listed.unused_bytes

    def list_all(self) -> None:
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
            with suppress(OSError):
                if self._is_in_use(file.namespace):  # since it was listed
                    listed.used.add(file.namespace)
                    listed.used_bytes += file.num_bytes
                else:
                    file.path.unlink(missing_ok=True)
                listed.unused_bytes -= file.num_bytes

    def _is_in_use(self, namespace: Path) -> bool:
        return is_in_use(namespace / JOURNALS, self._now())

    def _list(self) -> Iterator[None]:
        """List the files, with a pause after each subfolder."""
        found = _Listing()
        unused: list[_UnusedFile] = []
        for path in _own_folders(self._own.parent, _NAMESPACE):
            if path.name != self._own.name:
                with suppress(OSError):
                    yield from self._list_namespace(path, found, unused)
        found.unused.extend(sorted(unused))
        self._listed = found

    def _list_namespace(
        self, path: Path, found: _Listing, unused: list[_UnusedFile]
    ) -> Iterator[None]:
        is_used = self._is_in_use(path)
        if is_used:
            found.used.add(path)
        has_files = False
        for folder in _own_folders(path, _PREFIX):
            for file in _files(folder):
                has_files = True
                if is_used:
                    found.used_bytes += file.num_bytes
                else:
                    found.unused_bytes += file.num_bytes
                    unused.append(file)
            yield
        if not (is_used or has_files):
            self._remove_empty(path)

    def _remove_empty(self, path: Path) -> None:
        """Remove a namespace without blocks. What is not ours in it stays, and so does the folder.

        Raises OSError if that is so.
        """
        is_new = path.stat().st_mtime > self._now() - JOURNAL_AGE_S
        if is_new or self._is_in_use(path):
            return  # a process may be about to use it
        for folder in _own_folders(path, re.compile(JOURNALS)):
            _remove_files(folder, JOURNAL)
        for folder in _own_folders(path, _PREFIX):
            _remove_files(folder, _PART)
        path.rmdir()


def _own_folders(parent: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the folders of these names that belong to this user, without links."""
    with suppress(FileNotFoundError), os.scandir(parent) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if pattern.fullmatch(entry.name)
            and entry.is_dir(follow_symlinks=False)
            and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        ]
    return []


def _files(folder: Path) -> Iterator[_UnusedFile]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # just deleted
                if _is_block(folder, entry.name) and entry.is_file(follow_symlinks=False):
                    facts = entry.stat(follow_symlinks=False)
                    yield _UnusedFile(facts.st_mtime, Path(entry.path), facts.st_size)


def _is_block(folder: Path, file: str) -> bool:
    stem, suffix = os.path.splitext(file)
    try:
        name, _ = block_of(stem)
    except ValueError:
        return False
    return suffix == SUFFIX and len(name) >= MIN_NAME_BYTES and stem.startswith(folder.name)


def _remove_files(folder: Path, pattern: re.Pattern[str]) -> None:
    """Remove the files of these names in a folder, and the folder."""
    for path in list(folder.iterdir()):
        if pattern.fullmatch(path.name):
            path.unlink(missing_ok=True)
    folder.rmdir()
