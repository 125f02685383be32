"""Encoding checks of text input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper

from baton.core.errors import InvalidRequest


@contextmanager
def reject_invalid_text() -> Iterator[None]:
    """Turn UnicodeEncodeError into InvalidRequest."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not valid UTF-8 (at character {error.start}); convert it first"
        ) from error


def defer_stdin_errors() -> None:
    """Decode standard input as UTF-8 in any locale. `reject_invalid_text` reports the errors."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
