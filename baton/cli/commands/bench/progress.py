"""Progress bar of the requests of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from baton.cli.show import console

if TYPE_CHECKING:
    from baton.bench.running import OnProgress


@contextmanager
def requests_bar() -> Iterator[OnProgress]:
    """Yield a function that updates the bar; without a terminal, it does nothing."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda _name, _ended, _planned: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=screen, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda name, ended, planned: bar.update(
            task, description=name, completed=ended, total=planned
        )
