"""Results of commands: console tables, plain and never truncated in a pipe, and JSON files.

Help pages are plain text, so rich is imported on first use.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from baton.bench.running import OnProgress

# Control characters move the cursor, change colours or ring the bell: never pass on a model's.
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
WIDE = 240  # where no terminal bounds the width


def console(*, stderr: bool = False, wide: int = WIDE) -> Console:
    """Return a console that shows texts as they are; `wide` is its width without a terminal.

    Tokens, paths and names contain brackets and colons, which rich would take for markup and emoji.
    """
    from rich.console import Console

    terminal = Console(stderr=stderr, markup=False, emoji=False)
    if not terminal.is_terminal:
        terminal.width = wide
    return terminal


def for_terminal(text: str) -> str:
    """Remove control characters from a model's text if standard output is a terminal."""
    return text.translate(CONTROLS) if sys.stdout.isatty() else text


def show_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    console().print(table_of(title, rows))


def write_json(path: Path | None, values: object) -> None:
    """Write values to a JSON file if there is a path. Unknown types are written as text."""
    if path is not None:
        text = json.dumps(values, indent=2, default=str)
        path.write_text(text + "\n", encoding="utf-8")


def table_of(
    title: str, rows: Sequence[Mapping[str, object]], to_the_right: Collection[str] = ()
) -> Table:
    """Make a table with one column per key of the first row.

    Numbers are right-aligned, and so are the columns `to_the_right`.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name, cell in rows[0].items() if rows else ():
        is_right = isinstance(cell, int | float) or name in to_the_right
        table.add_column(
            name.replace("_", " "), justify="right" if is_right else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(_text(cell) for cell in row.values()))
    return table


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


def _text(cell: object) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
