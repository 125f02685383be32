"""Help texts and shell completion of all commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from baton.cli import app
from benchmarks.cli import app as benchmarks_app


def commands(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield " ".join([*path, name]), command


COMMANDS = {
    f"{program} {name}": command
    for program, one in (("baton", app), ("python -m benchmarks", benchmarks_app))
    for name, command in commands(typer.main.get_command(one))
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_summary_an_example_and_options_that_say_what_they_do(
    name: str,
) -> None:
    command = COMMANDS[name]

    summary = command.help.split("\n")[0]
    assert summary.endswith(".")
    assert name in command.epilog or f"{name.removeprefix('baton ')} --" in command.epilog
    for param in command.params:
        assert param.help, param.name


def complete(words: str) -> list[str]:
    environment = {
        "_BATON_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "baton"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=True,
    )
    return done.stdout.split()


def test_the_shell_completes_commands_and_options() -> None:
    assert complete("baton serve dec") == ["decode"]
    assert "--kv-cache-memory" in complete("baton up --kv-c")


def test_help_is_plain_text_where_no_terminal_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton", "up", "--help"], capture_output=True, text=True, check=True
    )

    assert "\x1b" not in done.stdout
    assert "Examples" in done.stdout
