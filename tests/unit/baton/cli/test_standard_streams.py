"""Commands whose standard streams are closed."""

from __future__ import annotations

import subprocess
import sys

FIRST_NUMBERS = """
import os, sys
from baton.cli.program import prepare
prepare()
print(sys.stdin.read() == "", sys.stderr.writable(), min(os.pipe()) > 2)
"""


def run_shell(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_command_fails_if_its_output_goes_nowhere() -> None:
    done = run_shell(">&-", "-m", "baton", "--version")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "baton: error: standard output is closed; redirect it, such as to /dev/null\n"
    )


def test_a_command_needs_neither_input_nor_an_error_stream() -> None:
    done = run_shell("<&- 2>&-", "-m", "baton", "--version")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("baton ")


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    assert run_shell("<&- 2>&-", "-c", FIRST_NUMBERS).stdout == "True True True\n"
