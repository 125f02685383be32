"""Text that came from outside may not be Unicode."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper

from engine.errors import InvalidRequest


@contextmanager
def valid_text() -> Iterator[None]:
    """Around whatever encodes a prompt. Raises InvalidRequest."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is no valid UTF-8 (at character {error.start}); convert it first"
        ) from error


def read_anything() -> None:
    """Whatever the terminal's settings are, standard input fails where its text is used."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
