"""Partial results of a measurement that is interrupted or fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def report_on_exit(results: Sequence[object], report: Callable[[bool], None]) -> Iterator[None]:
    """Call `report` after the block with True if the block completed.

    After a failure or Ctrl-C, `report(False)` is called if there are results, and the exception is
    raised again.
    """
    try:
        yield
    except BaseException as error:
        if results:
            where = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
            kept = "the results up to then are kept, the rest is missing"
            print(f"baton: warning: broken off{where}; {kept}", file=sys.stderr)
            report(False)
        raise
    report(True)
