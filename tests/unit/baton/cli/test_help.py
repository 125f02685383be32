"""Help texts and shell completion of all commands."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from baton.cli import make_app, names_of
from baton.cli.help_page import ALWAYS, FIRST_OPTIONS
from baton.cli.program import command_of
from benchmarks.cli import app as benchmarks_app
from tests.support.baton_command import call_baton


def commands(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield " ".join([*path, name]), command


COMMANDS = {
    f"{program} {name}": command
    for program, one in (("baton", make_app()), ("python -m benchmarks", benchmarks_app))
    for name, command in commands(command_of(one))
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_summary_an_example_and_options_with_help(
    name: str,
) -> None:
    command = COMMANDS[name]

    summary = command.help.split("\n")[0]
    assert summary.endswith(".")
    assert name in command.epilog or f"{name.removeprefix('baton ')} --" in command.epilog
    for param in command.params:
        assert param.help, param.name


@pytest.mark.parametrize("name", FIRST_OPTIONS)
def test_short_help_of_a_long_command_has_a_dozen_options_and_refers_to_the_full_help(
    name: str,
) -> None:
    page = call_baton(*name.split(), "--help", COLUMNS="80").stdout

    assert len(page.splitlines()) < 50
    assert page.count("\n  --") <= 14
    assert f"baton {name} --help-all shows" in page
    for param in COMMANDS[f"baton {name}"].params:
        is_first = param.name in (*FIRST_OPTIONS[name], *ALWAYS)
        assert bool(row_of(param, page)) is (is_first or param.param_type_name == "argument")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith("baton ")])
def test_help_neither_truncates_names_nor_interprets_text_as_markup(name: str) -> None:
    page = call_baton(*name.split()[1:], "--help-all", COLUMNS="80").stdout

    for param in COMMANDS[name].params:
        if not param.hidden:
            assert row_of(param, page), param.name
            assert " ".join(param.help.split()) in " ".join(page.split())


def row_of(param: Any, page: str) -> re.Match[str] | None:
    written = param.opts[-1] if param.param_type_name == "option" else param.metavar or param.name
    return re.search(rf"^  (-\S+, )*{written}(?![\w-])", page, re.MULTILINE)


def complete(words: str) -> list[str]:
    environment = {
        "_BATON_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    return call_baton(**environment).stdout.split()


def test_shell_completion_offers_commands_and_options() -> None:
    assert complete("baton serve dec") == ["decode"]
    assert "--kv-cache-memory" in complete("baton up --kv-c")


def test_help_without_a_terminal_is_plain_text() -> None:
    page = call_baton("up", "--help").stdout

    assert "\x1b" not in page
    assert "Examples" in page


def test_a_command_line_imports_its_command_alone() -> None:
    script = """
import sys
from baton.cli import make_app, names_of
make_app(names_of(["run", "Hello", "--max-tokens", "4"]))
print(*sorted(name for name in sys.modules if name.startswith("baton.cli.commands.")))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)

    assert run.stdout.split() == ["baton.cli.commands.run"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("--help",), ("runn",), ("--config", "run"), ("run", "--config=a.toml")],
)
def test_other_command_lines_have_all_commands(arguments: tuple[str, ...]) -> None:
    assert names_of(arguments) == names_of(())
    assert {"up", "run", "nodes", "reset-prefix-cache"} <= {*names_of(())}


def test_a_settings_file_of_the_environment_is_checked_against_all_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_RUN_CONFIG", "a.toml")

    assert names_of(("run",)) == names_of(())
