"""Encoding checks of text input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper

from engine.errors import InvalidRequest


@contextmanager
def valid_text() -> Iterator[None]:
    """Turn UnicodeEncodeError into InvalidRequest."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is no valid UTF-8 (at character {error.start}); convert it first"
        ) from error


def read_anything() -> None:
    """Decode standard input as UTF-8 and defer errors to `valid_text`, whatever the locale is."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
