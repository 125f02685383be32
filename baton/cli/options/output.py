"""Options of result files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.core.options import OUTPUT
from baton.writable import file_error, folder_error


def check_writable_file(path: Path | None) -> Path | None:
    """Reject a file that cannot be written, before the work whose result goes there."""
    trouble = None if path is None else file_error(path)
    if trouble is not None:
        raise typer.BadParameter(trouble)
    return path


def check_creatable_folder(folder: Path | None) -> Path | None:
    """Reject a folder that cannot be created, with its parents, when it is first written to."""
    trouble = None if folder is None else folder_error(folder)
    if trouble is not None:
        raise typer.BadParameter(trouble)
    return folder


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Also write the figures to this JSON file.",
        callback=check_writable_file,
        rich_help_panel=OUTPUT,
    ),
]
