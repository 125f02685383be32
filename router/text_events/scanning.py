"""Scanning of text that arrives in pieces: marks, and the nesting of JSON. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_SPACE_CHARACTERS = 1 << 10  # in front of a mark, for which a parser looks again at each token
_SIGNS = re.compile(r'["\\{}\[\],\x00-\x1f]')


class JsonScan:
    """Tracks strings and nesting in the text of one JSON value. It does not validate."""

    def __init__(self) -> None:
        self._depth = 0
        self._skip = 0  # characters at the beginning of the next piece that belong to an escape
        self.is_in_string = False

    def scan(self, text: str) -> int | None:
        """Scan the next piece. Return the index after the value's last character, if it ends here.

        A raw control character ends a string, because JSON has none inside strings.
        """
        skip = self._skip
        for found in _SIGNS.finditer(text):
            index, sign = found.start(), found.group()
            if index < skip:
                continue
            if not self.is_in_string:
                end = self._outside(sign, index)
                if end is not None:
                    return end
            elif sign == "\\":
                skip = index + 2
            elif sign == '"' or sign < " ":
                self.is_in_string = False
                if self._depth == 0:
                    return index + 1
        self._skip = max(0, skip - len(text))
        return None

    def _outside(self, sign: str, index: int) -> int | None:
        """Process a sign outside strings. Return the index after the value, if it ends here."""
        if sign == '"':
            self.is_in_string = True
        elif sign in "{[":
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
            if self._depth <= 0:
                return index + 1 + self._depth
        elif sign == "," and self._depth == 0:
            return index
        return None


def find_first(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return the index of the first mark in the text, and the mark; (-1, "") without one."""
    found = [(index, mark) for mark in marks if (index := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))


def held_length(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix that may begin one of the marks."""
    longest = 0
    for mark in marks:
        index = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while index >= 0 and not mark.startswith(text[index:]):
            index = text.find(mark[0], index + 1)
        if index >= 0:
            longest = max(longest, len(text) - index)
    return longest
