"""Progress bar of the requests of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.cli.show import console

OnRequests = Callable[[str, int, int], None]  # label, ended and planned requests


@contextmanager
def requests_bar() -> Iterator[OnRequests]:
    """Yield a function that updates the bar; without a terminal, it does nothing."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda _label, _ended, _planned: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=screen, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda label, ended, planned: bar.update(
            task, description=label, completed=ended, total=planned
        )
