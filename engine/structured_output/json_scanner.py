"""Incremental scanner of JSON texts that keeps the items of some arrays unique. Pure.

States are immutable, so that drafted tokens can be tried and rolled back. The text is known to be
JSON, since a grammar allows nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum, auto

from baton.engine.structured_output.schemas.disjointness import json_key
from baton.engine.structured_output.schemas.unique_arrays import SchemaPlace


class Mode(Enum):
    VALUE = auto()  # before a value, or the end of an empty array
    STRING = auto()
    SCALAR = auto()  # in a number, true, false or null
    AFTER = auto()  # after a value
    NAME = auto()  # before a property's name, or the end of an empty object
    IN_NAME = auto()
    AFTER_NAME = auto()


@dataclass(frozen=True, slots=True)
class Level:
    """An open array or object."""

    place: SchemaPlace
    is_array: bool
    index: int = 0  # of the current item
    value: SchemaPlace | None = None  # of the current property's value
    begin: int = -1  # of the current item of a unique array, in the state's text
    keys: frozenset[Hashable] = frozenset()  # of the complete items
    texts: frozenset[bytes] = frozenset()  # without insignificant whitespace

    @property
    def is_unique(self) -> bool:
        return self.is_array and self.place.is_unique


@dataclass(frozen=True, slots=True)
class ScanState:
    """Position in a JSON text. `text` begins at or before all offsets that are still needed."""

    mode: Mode
    levels: tuple[Level, ...]
    root: SchemaPlace
    text: bytes = b""
    name_begin: int = -1
    is_escaped: bool = False

    def item_text(self, level: Level) -> bytes:
        """Return the text of the level's current item so far, without insignificant whitespace."""
        return b"" if level.begin < 0 else compact(self.text[level.begin :])


def begin_scan(root: SchemaPlace) -> ScanState:
    return ScanState(Mode.VALUE, (), root)


def scan(state: ScanState, data: bytes) -> ScanState | None:
    """Return the state after more text, or None if an item is repeated."""
    scanning = _Scanning(state, data)
    return scanning.end() if scanning.run() else None


MARKS = b'"}]'  # that end an item; other items end in front of the next mark
WHITESPACE = b" \n\r\t"
_IN_STRING = re.compile(rb'["\\]')
_STRING_OR_SPACE = re.compile(rb'("(?:[^"\\]|\\.)*(?:"|\\?$))|\s+', re.DOTALL)
_AFTER_SCALAR = re.compile(rb"[\s,\]}]")


class _Scanning:
    def __init__(self, state: ScanState, data: bytes) -> None:
        self._state = state
        self._mode = state.mode
        self._levels = list(state.levels)
        self._text = state.text + data
        self._at = len(state.text)
        self._name_begin = state.name_begin
        self._is_escaped = state.is_escaped

    def run(self) -> bool:
        while self._at < len(self._text):
            if self._mode in (Mode.STRING, Mode.IN_NAME):
                is_unique = self._scan_string()
            elif self._mode is Mode.SCALAR:
                found = _AFTER_SCALAR.search(self._text, self._at)
                self._at = len(self._text) if found is None else found.start()
                is_unique = found is None or self._end_value()
            else:
                is_unique = self._scan_mark(self._text[self._at])
            if not is_unique:
                return False
        return True

    def end(self) -> ScanState:
        is_needed = self._mode is Mode.IN_NAME or any(each.begin >= 0 for each in self._levels)
        return ScanState(
            self._mode,
            tuple(self._levels),
            self._state.root,
            self._text if is_needed else b"",
            self._name_begin,
            self._is_escaped,
        )

    def _scan_string(self) -> bool:
        if self._is_escaped:
            self._is_escaped = False
            self._at += 1
            return True
        found = _IN_STRING.search(self._text, self._at)
        if found is None:
            self._at = len(self._text)
            return True
        self._at = found.end()
        if found[0] == b"\\":
            self._is_escaped = True
            return True
        if self._mode is Mode.STRING:
            return self._end_value()
        name = json.loads(self._text[self._name_begin : self._at])
        self._levels[-1] = replace(self._levels[-1], value=self._levels[-1].place.member(name))
        self._mode = Mode.AFTER_NAME
        return True

    def _scan_mark(self, mark: int) -> bool:
        begin = self._at
        self._at += 1
        if mark in WHITESPACE:
            return True
        if mark in b"]}":
            self._levels.pop()
            return self._end_value()
        match self._mode:
            case Mode.NAME:
                self._mode, self._name_begin = Mode.IN_NAME, begin
            case Mode.AFTER_NAME:
                self._mode = Mode.VALUE
            case Mode.AFTER:
                level = self._levels[-1]
                self._mode = Mode.VALUE if level.is_array else Mode.NAME
                self._levels[-1] = replace(level, index=level.index + 1)
            case _:
                self._begin_value(begin, mark)
        return True

    def _begin_value(self, begin: int, mark: int) -> None:
        place = self._state.root
        if self._levels:
            level = self._levels[-1]
            place = level.place.item(level.index) if level.is_array else level.value or place
            if level.is_unique:
                self._levels[-1] = replace(level, begin=begin)
        if mark in b"[{":
            self._levels.append(Level(place, is_array=mark in b"["))
            self._mode = Mode.VALUE if mark in b"[" else Mode.NAME
        else:
            self._mode = Mode.STRING if mark in b'"' else Mode.SCALAR

    def _end_value(self) -> bool:
        """Record a complete value. Returns False if it repeats an item."""
        self._mode = Mode.AFTER
        level = self._levels[-1] if self._levels else None
        if level is None or level.begin < 0:
            return True
        text = self._text[level.begin : self._at]
        key = _key_of(text)
        if key in level.keys:
            return False
        self._levels[-1] = replace(
            level, begin=-1, keys=level.keys | {key}, texts=level.texts | {compact(text)}
        )
        return True


def compact(text: bytes) -> bytes:
    """Return a JSON text, or the beginning of one, without insignificant whitespace."""
    if text[:1] not in (b"{", b"["):
        return text.strip()
    return _STRING_OR_SPACE.sub(lambda found: found[1] or b"", text)


def _key_of(text: bytes) -> Hashable:
    try:
        return json_key(json.loads(text))
    except (ValueError, RecursionError):  # numbers and depths beyond Python's limits
        return b"".join(text.split())
