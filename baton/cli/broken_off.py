"""A measurement that breaks off keeps what it had: somebody waited for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def told_even_if_broken_off(
    found: Sequence[object], tell: Callable[[bool], None]
) -> Iterator[None]:
    """`tell` is called behind the block with whether that came to its end.

    A failure or Ctrl-C goes on from here as it came, after what was found until then is told.
    """
    try:
        yield
    except BaseException as error:
        if found:
            where = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
            kept = "what was measured until then is kept, the rest is missing"
            print(f"baton: warning: broken off{where}; {kept}", file=sys.stderr)
            tell(False)
        raise
    tell(True)
