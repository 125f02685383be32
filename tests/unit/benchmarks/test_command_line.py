"""`python -m benchmarks`: options as those of `baton`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cli import VARIABLE_PREFIX, app
from tests.support.command_lines import invoke


@pytest.mark.parametrize("arguments", [["policies", "--plot"], ["engine", "--json"]])
@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("nowhere/file", "there is no folder"),
        (".", "is a folder; name a file"),
        ("/proc/file", "cannot be written to"),
        (f"{'x' * 300}", "cannot be written to"),
    ],
)
def test_the_output_path_is_checked_before_the_measurement(
    arguments: list[str], path: str, complaint: str, tmp_path: Path
) -> None:
    ended = invoke(app, [*arguments, str(tmp_path / path)], env={"COLUMNS": "1000"})

    assert ended.exit_code == 2
    assert complaint in ended.output


def test_variables_and_a_file_set_options(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[scheduler]\nwaiting = 7\n")
    variables = {"BATON_BENCH_SCHEDULER_RUNNING": "3,4", "COLUMNS": "200"}

    shown = invoke(
        app,
        ["--config", str(file), "scheduler", "--show-config"],
        auto_envvar_prefix=VARIABLE_PREFIX,
        env=variables,
    )

    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.output.splitlines()]
    assert ["│", "running", "│", "3,4", "│", "BATON_BENCH_SCHEDULER_RUNNING", "│"] in rows
    assert ["│", "waiting", "│", "7", "│", str(file), "│"] in rows


def test_a_named_error_is_printed_as_one_line() -> None:
    command = [sys.executable, "-m", "benchmarks", "scheduler", "--running", "many"]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 2
    assert done.stderr == ("baton: error: 'many' is not a list of numbers; write it like 1,4,16\n")
