"""Tables of commands."""

from __future__ import annotations

import pytest

from baton.cli.show import show_table


@pytest.mark.parametrize("text", ["'[/'", "'[/b]'", "[s3]", "/models/[new]", ":100:"])
def test_cells_and_titles_are_not_interpreted_as_markup(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_table(f"of {text}", [{"token": text}])

    title, _, _, _, row, *_ = capsys.readouterr().out.splitlines()
    assert title.strip() == f"of {text}"
    assert row.strip("│ ") == text
