"""Text files of a trace: plain or gzip, a tar archive, or a folder."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import InvalidConfig

GZIP_MAGIC = b"\x1f\x8b"
MEMBER_SUFFIXES = (".json", ".jsonl")


class InvalidTrace(InvalidConfig):
    """A trace file cannot be read or has content that no known format allows."""


@dataclass(frozen=True, slots=True)
class TextFile:
    name: str
    text: str

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield each line that is not blank, and its place for error messages."""
        for number, line in enumerate(self.text.splitlines(), 1):
            if line.strip():
                yield f"{self.name}:{number}", line


def read_files(path: Path) -> list[TextFile]:
    """Return the files of a trace, sorted by name. Raises InvalidTrace."""
    with _named_errors(path):
        if path.is_dir():
            members = sorted(one for one in path.rglob("*.json*") if one.is_file())
            files = [TextFile(str(one), _decoded(one.read_bytes())) for one in members]
        elif tarfile.is_tarfile(path):
            files = _members(path)
        else:
            files = [TextFile(str(path), _decoded(path.read_bytes()))]
    if not any(file.text.strip() for file in files):
        raise InvalidTrace(f"{path} has no requests")
    return files


def _members(path: Path) -> list[TextFile]:
    with tarfile.open(path) as archive:
        names = sorted(
            (one for one in archive.getmembers() if one.isfile()), key=lambda one: one.name
        )
        return [
            TextFile(f"{path}:{one.name}", _decoded(content.read()))
            for one in names
            if one.name.endswith(MEMBER_SUFFIXES)
            and (content := archive.extractfile(one)) is not None
        ]


def _decoded(content: bytes) -> str:
    if content.startswith(GZIP_MAGIC):
        content = gzip.decompress(content)
    return content.decode("utf-8-sig")


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError, EOFError, zlib.error, tarfile.TarError) as error:
        raise InvalidTrace(f"{path} cannot be read: {error}") from error
