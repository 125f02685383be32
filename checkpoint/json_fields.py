"""Typed access to small JSON files, which name the file and the field in their errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeGuard

from baton.core.errors import ModelError

MAX_INT = (1 << 31) - 1
MAX_SHOWN = 200  # characters of a wrong value in an error
MAX_TEXT_BYTES = 64 << 20  # per file; the largest tokenizers have 35 MB


def read_model_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a text file of a model folder. Raises ModelError, which names the file.

    Pipes and devices are refused: reading them might never end.
    """
    try:
        if not path.exists():
            raise ModelError(f"{path} is missing; a model folder must have it")
        if not path.is_file():
            raise ModelError(f"{path} is not a file; fetch it again")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ModelError(f"{path} has more than {max_bytes} bytes; fetch it again")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error


class JsonFields:
    """Typed access to a JSON object. Errors name the file and the field."""

    def __init__(self, where: str, fields: Mapping[str, object]) -> None:
        self.where = where
        self._fields = fields

    @classmethod
    def read(cls, path: Path, max_bytes: int = MAX_TEXT_BYTES) -> JsonFields:
        try:
            parsed = json.loads(read_model_text(path, max_bytes))
        except RecursionError:
            raise ModelError(f"{path} is nested too deeply; fetch it again") from None
        except ValueError as error:  # also for a number of too many digits
            raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error
        if not isinstance(parsed, dict):
            raise ModelError(f"{path} is not a JSON object; fetch it again")
        return cls(str(path), parsed)

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def names(self) -> Iterable[str]:
        return self._fields.keys()

    def get(self, name: str) -> object:
        return self._fields.get(name)

    def inner(self, name: str) -> JsonFields:
        found = self._fields.get(name)
        if not isinstance(found, dict):
            raise self.wrong(name, "must be an object")
        return JsonFields(f"{self.where}: {name}", found)

    def number(
        self, name: str, default: float | None = None, *, above: float | None = None
    ) -> float:
        found = self._fields.get(name)
        found = default if found is None else found
        if not _is_number(found):
            raise self.wrong(name, "must be a number")
        if above is not None and found <= above:
            raise self.wrong(name, f"must be a number above {above:g}")
        return float(found)

    def optional_number(self, name: str, *, above: float | None = None) -> float | None:
        return self.number(name, above=above) if self.has(name) else None

    def positive_int(self, name: str, default: int | None = None) -> int:
        found = self.number(name, default)
        if found < 1 or found != int(found):
            raise self.wrong(name, "must be a whole number above 0")
        if found > MAX_INT:
            raise self.wrong(name, f"must be at most {MAX_INT}")
        return int(found)

    def flag(self, name: str, default: bool) -> bool:
        found = self._fields.get(name)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self.wrong(name, "must be true or false")
        return found

    def numbers(self, name: str) -> tuple[float, ...]:
        found = self._fields.get(name)
        if not isinstance(found, list) or not all(map(_is_number, found)):
            raise self.wrong(name, "must be a list of numbers")
        return tuple(map(float, found))

    def with_defaults(self, defaults: Mapping[str, object]) -> JsonFields:
        """Return these fields, with the default of each field that is missing."""
        return JsonFields(self.where, {**defaults, **self._fields})

    def with_fields(self, fields: Mapping[str, object]) -> JsonFields:
        """Return these fields, some of them replaced."""
        return JsonFields(self.where, {**self._fields, **fields})

    def wrong(self, name: str, expected: str) -> ModelError:
        found = self._fields.get(name)
        state = "is missing" if found is None else f"is {shorten(repr(found))}"
        return ModelError(f"{self.where}: {name!r} {state}; it {expected}")


def shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether this fits a finite float. Python's JSON also has NaN and Infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max
