"""Trace store: a folder of small files, shared by all processes of a machine.

Each process appends to its own file. When the file is full, the process begins the next one and
deletes the oldest files of the folder, of any process, until the folder is within its limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.telemetry.tracing.otlp_json import ExportedSpan, MalformedSpans, line_of, spans_of
from baton.telemetry.tracing.spans import Attributes, Span

SUFFIX = ".otlp.jsonl"
NUM_FILES = 16  # full files that together reach the limit


class TraceWriter:
    """Span writer. It reopens its file for each batch: another process may have deleted it."""

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
    """Delete the oldest files until the folder is within the limit."""
    files = sorted(_files(folder), key=lambda file: file[1].st_mtime_ns, reverse=True)
    total_bytes = 0
    for path, stat in files:
        total_bytes += stat.st_size
        if total_bytes > limit_bytes:
            path.unlink(missing_ok=True)


def read_spans(folder: Path) -> Iterator[ExportedSpan]:
    """Yield all stored spans, oldest file first. Truncated lines, as after a crash, are skipped."""
    for path, _ in sorted(_files(folder), key=lambda file: file[1].st_mtime_ns):
        yield from _spans_in(path)


def _spans_in(path: Path) -> Iterator[ExportedSpan]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, PermissionError):
        return  # deleted in the meantime, or another user's
    for line in lines:
        try:
            yield from spans_of(line)
        except MalformedSpans:
            continue


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            yield path, path.stat()
        except FileNotFoundError:
            continue  # deleted in the meantime
