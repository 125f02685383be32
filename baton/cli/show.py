"""Tables for people: in colour on a terminal, plain and never cut off elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

# What moves the cursor, colours the screen or rings: a model may write it, a terminal obeys it.
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
WIDE = 240  # where no terminal bounds the width


def console(*, stderr: bool = False) -> Console:
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=WIDE)


def for_terminal(text: str) -> str:
    """A model's text without control characters; unchanged where no terminal obeys them."""
    return text.translate(CONTROLS) if sys.stdout.isatty() else text


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
