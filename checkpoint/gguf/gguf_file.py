"""A model's GGUF file, or the files into which it is split. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np

from baton.checkpoint.gguf.header import Header, TensorEntry, Value, read_header
from baton.checkpoint.json_fields import shorten
from baton.core.errors import ModelError

SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>(?!00000)\d{5})\.gguf")
T = TypeVar("T")


class GgufFile:
    """Metadata and tensors of a model. Getters raise ModelError, which names file and field."""

    def __init__(self, headers: list[Header]) -> None:
        self._headers = headers
        self.path = headers[0].path
        self.metadata: Mapping[str, Value] = headers[0].metadata
        self.tensors: dict[str, TensorEntry] = {}
        self.path_of: dict[str, Path] = {}  # by tensor
        for header in headers:
            for name, entry in header.tensors.items():
                if name in self.tensors:
                    raise ModelError(f"{header.path} has {name!r}, like {self.path_of[name]}")
                self.tensors[name] = entry
                self.path_of[name] = header.path

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Return the file as it is in use elsewhere in this process, or read it.

        Vocabularies make headers slow to read, and several parts of a process open a model.
        """
        try:
            found = path.stat()
        except OSError:
            return cls.read(path)  # raises ModelError
        key = path, found.st_ino, found.st_mtime_ns, found.st_size
        return FILES.get(key) or FILES.setdefault(key, cls.read(path))

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the headers of a file and of the other parts of the same model."""
        headers = [read_header(part) for part in list_parts(path)]
        found = cls(headers)
        count = found.get("split.count", int, 0)
        if count > 1 and count != len(headers):
            raise ModelError(
                f"{path} is one of {count} files: its name must end with 00001-of-{count:05}.gguf"
            )
        expected = found.get("split.tensors.count", int, len(found.tensors))
        if expected != len(found.tensors):
            raise ModelError(
                f"{path} and its other parts have {len(found.tensors)} of {expected} tensors; "
                "fetch them again"
            )
        return found

    def with_file(self, other: GgufFile) -> GgufFile:
        """Return this file with the tensors of another one."""
        return GgufFile([*self._headers, *other._headers])

    @property
    def paths(self) -> list[Path]:
        return [header.path for header in self._headers]

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    @property
    def architecture(self) -> str:
        return self.require("general.architecture", str)

    def require(self, name: str, kind: type[T]) -> T:
        if name not in self.metadata:
            raise ModelError(f"{self.path} lacks the metadata field {name!r}; fetch it again")
        return self._typed(name, kind)

    def get(self, name: str, kind: type[T], default: T) -> T:
        return self._typed(name, kind) if name in self.metadata else default

    def has(self, name: str) -> bool:
        return name in self.metadata

    def list_of(self, name: str, kind: type[T]) -> list[T]:
        """Return a list, empty if the field is missing."""
        found = self.metadata.get(name, [])
        # One check by types is fast for the lists of a vocabulary.
        if not isinstance(found, list) or not set(map(type, found)) <= {kind}:
            raise self.wrong(name, f"must be a list of {kind.__name__}")
        return cast("list[T]", found)

    def wrong(self, name: str, expected: str) -> ModelError:
        found = shorten(repr(self.metadata.get(name)))
        return ModelError(f"{self.path}: the metadata field {name!r} is {found}; it {expected}")

    def read_floats(self, name: str) -> list[float]:
        """Read a small tensor of F32."""
        entry = self.tensors[name]
        if entry.type.name != "F32" or len(entry.shape) != 1:
            raise ModelError(f"{self.path_of[name]}: {name!r} must be a list of F32")
        numbers = np.fromfile(self.path_of[name], "<f4", count=entry.shape[0], offset=entry.offset)
        found: list[float] = numbers.tolist()
        return found

    def _typed(self, name: str, kind: type[T]) -> T:
        found = self.metadata[name]
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind:
            raise self.wrong(name, f"must be of the type {kind.__name__}")
        return found


FILES: WeakValueDictionary[tuple[Path, int, int, int], GgufFile] = WeakValueDictionary()


def list_parts(path: Path) -> list[Path]:
    """Return the files of a model by the path of one of them. Raises ModelError if some lack."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    missing = [part.name for part in parts if len(parts) > 1 and not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{path.parent} lacks {missing[0]}{more}, which {path.name} needs")
    return parts


def part_names(name: str) -> list[str]:
    """Return the names of a model's files by the name or path of one of them."""
    match = SPLIT_NAME.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def is_later_part(name: str) -> bool:
    """Return whether a file has a part of a model, but not the first."""
    match = SPLIT_NAME.fullmatch(name)
    return match is not None and int(match["number"]) != 1
