"""Commands in the documentation: they exist, and so do their options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cli import make_app
from baton.cli.command import DEFAULT_COMMAND, DefaultGroup
from baton.cli.program import command_of

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("models/*/README.md")]
BLOCK = re.compile(r"```.*?\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"(?:^|\S/|[A-Z_]=\S* |\| )baton (.*)")
END = {"|", ">", "<", "&&", "&", ";"}
EVERYWHERE = {"--help", "--help-all", "--config", "--show-config"}


def written_commands(page: str) -> Iterator[str]:
    """Yield the arguments of each command in code of a page."""
    text = page.replace("\\\n", " ")
    lines = re.findall(r"`([^`]+)`", BLOCK.sub("", text))
    lines += re.findall(r"^    (.+)$", text, re.MULTILINE)
    lines += [line for block in BLOCK.findall(text) for line in block.splitlines()]
    for line in lines:
        found = COMMAND.search(" ".join(line.split()))
        if found is not None:
            yield found[1]


def unknown_in(arguments: str) -> list[str]:
    """Return the commands and options that do not exist."""
    try:
        words = shlex.split(arguments, comments=True)
    except ValueError:
        return []  # a sentence with an apostrophe
    command: Any = command_of(make_app())
    for word in words:
        if word in END:
            break
        further = getattr(command, "commands", {})
        if word not in further and isinstance(command, DefaultGroup):
            command = further[DEFAULT_COMMAND]
        if word in further:
            command = further[word]
        elif word.startswith("--"):
            flags = {flag for param in command.params for flag in param.opts}
            flag = word.partition("=")[0]
            if flag not in flags | EVERYWHERE:
                return [f"baton {arguments}: {flag}"]
    return []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_written_command_has_its_options(page: Path) -> None:
    commands = written_commands(page.read_text(encoding="utf-8"))

    assert [each for command in commands for each in unknown_in(command)] == []
