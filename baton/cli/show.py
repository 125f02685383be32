"""Tables for people: in colour on a terminal, plain and never cut off elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

WIDE = 240  # where no terminal bounds the width


def console(*, stderr: bool = False) -> Console:
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=WIDE)


def show_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    console().print(table_of(title, rows))


def table_of(title: str, rows: Sequence[Mapping[str, object]]) -> Table:
    """One column for each key of the first row; numbers to the right."""
    table = Table(title=title, title_justify="left")
    for name, cell in rows[0].items() if rows else ():
        is_number = isinstance(cell, int | float)
        table.add_column(
            name.replace("_", " "), justify="right" if is_number else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(_text(cell) for cell in row.values()))
    return table


def _text(cell: object) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
