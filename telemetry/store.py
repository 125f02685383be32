"""Traces on disk: a ring of small files that every process of this machine may write.

A process appends to a file of its own. When that is full it begins the next one, and the oldest
files of the folder are deleted, whoever wrote them, until the folder is within its limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from telemetry.otlp_json import NotSpans, ToldSpan, line_of, spans_of
from telemetry.spans import Attributes, Span

SUFFIX = ".otlp.jsonl"
NUM_FILES = 16  # that the whole limit makes up at least


class TraceWriter:
    """Opens its file anew for each batch: another process may have deleted it in the meantime."""

    def __init__(self, folder: Path, limit_bytes: int, resource: Attributes, owner: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._file_bytes = limit_bytes // NUM_FILES
        self._resource = resource
        self._owner = owner
        self._number = 0
        self._path = self._next_path()

    def write(self, spans: Sequence[Span]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line_of(spans, self._resource))
            num_bytes = file.tell()
        if num_bytes >= self._file_bytes:
            self._path = self._next_path()
            prune(self._folder, self._limit_bytes - self._file_bytes)

    def _next_path(self) -> Path:
        self._number += 1
        return self._folder / f"{self._owner}-{os.getpid()}-{self._number:06d}{SUFFIX}"


def prune(folder: Path, limit_bytes: int) -> None:
    """Delete the oldest files until what is left is within the limit."""
    files = sorted(_files(folder), key=lambda file: file[1].st_mtime_ns, reverse=True)
    total_bytes = 0
    for path, stat in files:
        total_bytes += stat.st_size
        if total_bytes > limit_bytes:
            path.unlink(missing_ok=True)


def read_spans(folder: Path) -> Iterator[ToldSpan]:
    """Whatever is there; lines that were cut off, as by a crash, are left out."""
    for path, _ in sorted(_files(folder), key=lambda file: file[1].st_mtime_ns):
        yield from _spans_in(path)


def _spans_in(path: Path) -> Iterator[ToldSpan]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, PermissionError):
        return  # deleted since we looked, or another user's
    for line in lines:
        try:
            yield from spans_of(line)
        except NotSpans:
            continue


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            yield path, path.stat()
        except FileNotFoundError:
            continue  # deleted since we looked
