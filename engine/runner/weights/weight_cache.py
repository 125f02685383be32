"""Folder of packed weights, so that the next start reads them instead of packing them again."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from baton.core.units import format_bytes
from baton.engine.runner.weights.packed_file import (
    DamagedFile,
    Report,
    num_packed_bytes,
    read_packed,
    write_packed,
)
from baton.engine.runner.weights.packed_weight import PackedWeight

log = logging.getLogger(__name__)

MIN_FREE_BYTES = 1 << 30  # that an entry leaves on its disk
_ENTRY, _PART = ".packed", ".part"


class CachedWeights:
    """Packed matrices of one load, by name: those of an entry, or those that become one."""

    def __init__(self, entry: dict[str, PackedWeight] | None) -> None:
        self.is_found = entry is not None
        self.is_written = False
        self._entry = entry or {}
        self.packed: dict[str, PackedWeight] = {}
        self.digest: str | None = None  # set when all weights are loaded

    def find(self, name: str) -> PackedWeight | None:
        return self._entry.pop(name, None)

    def add(self, name: str, packed: PackedWeight) -> None:
        self.packed[name] = packed


class WeightCache:
    """Entries by key, of at most `max_bytes` together. An entry is written by one process.

    A key covers all that the bytes depend on, but for the weights themselves: an entry has their
    digest. Entries appear by renaming, and a running process keeps the file that it has mapped, so
    that an entry can be deleted or replaced at any time, but never written. If the folder cannot be
    used, a warning says so and weights are packed as without it.
    """

    def __init__(self, folder: Path, max_bytes: int, num_threads: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._num_threads = num_threads

    @contextmanager
    def open(
        self, key: str, digest: Callable[[], str], report: Report = lambda *_: None
    ) -> Iterator[CachedWeights]:
        """Yield the entry of `key`, or one that is written at the end if its digest is then set.

        Waits for another process that packs the same weights. `digest` returns that of the weights.
        """
        path = self._folder / f"{key}{_ENTRY}"
        with ExitStack() as stack:
            part: BinaryIO | None = None
            found = None
            try:
                self._make_folder()
                found = self._read(path, digest, report)
                if found is None:
                    part = stack.enter_context(_locked(path.with_suffix(_PART)))
                    found = self._read(path, digest, report)
            except OSError as error:
                self._warn(error)
            weights = CachedWeights(found)
            try:
                yield weights
                if part is not None and weights.digest is not None and not weights.is_found:
                    weights.is_written = self._write(path, part, weights.digest, weights.packed)
            finally:
                if part is not None and _is_at(part, path.with_suffix(_PART)):
                    _unlink(path.with_suffix(_PART))

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = self._folder.stat()
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{self._folder} belongs to another user, or others may write")

    def _read(
        self, path: Path, digest: Callable[[], str], report: Report
    ) -> dict[str, PackedWeight] | None:
        try:
            with path.open("rb") as file:
                began_s = time.monotonic()
                found = read_packed(file, digest, self._num_threads, report)
                log.info("Read the packed weights in %.1f s: %s", time.monotonic() - began_s, path)
                with suppress(OSError):  # of a folder that is read-only
                    os.utime(file.fileno())
                return found
        except FileNotFoundError:
            return None
        except DamagedFile as error:
            log.warning("%s is not used and will be written again: %s", path, error)
            return None

    def _write(
        self, path: Path, part: BinaryIO, digest: str, weights: dict[str, PackedWeight]
    ) -> bool:
        num_bytes = num_packed_bytes(weights)
        if num_bytes > self._max_bytes:
            log.info(
                "The packed weights take %s, more than weight-cache-limit: not cached",
                format_bytes(num_bytes),
            )
            return False
        try:
            self._evict(self._max_bytes - num_bytes, path)
            if shutil.disk_usage(self._folder).free < num_bytes + MIN_FREE_BYTES:
                raise OSError(f"its disk has no room for {format_bytes(num_bytes)}")
            write_packed(part, digest, weights, self._num_threads)
            os.fchmod(part.fileno(), 0o400)  # running nodes map it: it is replaced, never written
            path.with_suffix(_PART).rename(path)
            self._evict(self._max_bytes - path.stat().st_size, path)  # others may have written
            log.info("Wrote the packed weights, %s: %s", format_bytes(num_bytes), path)
            return True
        except OSError as error:
            self._warn(error)
            return False

    def _evict(self, max_bytes: int, kept: Path) -> None:
        """Delete the least recently used entries until those besides `kept` have `max_bytes`.

        What dead processes have not finished is deleted too.
        """
        for part in self._folder.glob(f"*{_PART}"):
            _delete_unlocked(part)
        found = []
        for entry in self._folder.glob(f"*{_ENTRY}"):
            with suppress(FileNotFoundError):
                facts = entry.stat()
                found.append((facts.st_mtime_ns, facts.st_size, entry))
        others = [each for each in found if each[-1] != kept]
        total = sum(size for _, size, _ in others)
        for _, size, entry in sorted(others):
            if total <= max_bytes:
                return
            _unlink(entry)
            total -= size

    def _warn(self, error: OSError) -> None:
        log.warning(
            "Packed weights are not cached in %s, so that starts are slow: %s; choose another "
            "folder by weight-cache-dir, or none",
            self._folder,
            error,
        )


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file and lock it. A process that has locked it before may have renamed it."""
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("Waiting for another process that packs the same weights")
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, path):
                yield file
                return


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _delete_unlocked(path: Path) -> None:
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(file, path):
            path.unlink()


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
