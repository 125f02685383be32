"""Report of a GPU: failing, slow and missing commands are part of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.cli import make_app
from benchmarks.cli import app as benchmarks_app
from tests.support.command_lines import invoke
from tools.gpu_report import MAX_SHOWN_LINES, Check, checks, report, run, vllm_outcome


def python(program: str, limit_s: float = 60.0) -> Check:
    return Check("check", (sys.executable, "-c", program), limit_s)


@pytest.mark.parametrize(
    ("check", "status", "output"),
    [
        (python("print('hello')"), "ok", "hello"),
        (python("import sys; print('why'); sys.exit(3)"), "failed with exit code 3", "why"),
        (python("import os; print(os.environ['TRITON_INTERPRET'])"), "ok", "0"),
        (Check("check", ("/no/such/command",)), "did not start: ", ""),
    ],
)
def test_an_outcome_has_status_and_output(check: Check, status: str, output: str) -> None:
    outcome = run(check)

    assert outcome.status.startswith(status)
    assert outcome.output.strip() == output


def test_a_command_ends_at_its_limit() -> None:
    outcome = run(python("import time; print('begun', flush=True); time.sleep(60)", limit_s=3.0))

    assert outcome.status == "ended after 3 s"
    assert outcome.output.startswith("begun")


def test_the_report_has_a_table_and_the_last_lines_of_each_output() -> None:
    long = run(python(f"print(*range({MAX_SHOWN_LINES + 5}), sep='\\n')"))

    text = report([long])

    assert "| check | ok | " in text
    assert "(5 lines are left out)\n5\n6\n" in text


def test_each_check_names_the_device_and_the_model_where_it_can() -> None:
    commands = [" ".join(check.command) for check in checks("cuda:1", "some/model")]

    assert sum("--device cuda:1" in command for command in commands) == 7
    assert sum("--model some/model" in command for command in commands) == 6
    assert not [command for command in commands if "vllm-venv" in command]


def test_the_commands_of_baton_and_its_benchmarks_exist_with_their_options() -> None:
    apps = {"baton": make_app(), "benchmarks": benchmarks_app}
    found = []
    for check in checks("cuda:1", "some/model"):
        name = check.command[2] if check.command[1:2] == ("-m",) else ""
        if name in apps:
            ended = invoke(apps[name], [*check.command[3:], "--show-config"])
            assert ended.exit_code == 0, ended.output
            found.append(check.name)

    assert {"engine", "1P1D", "1P1D beside vLLM"} <= set(found)


def test_vllm_is_measured_where_it_is_installed(tmp_path: Path) -> None:
    commands = [" ".join(check.command) for check in checks("cuda", "m", vllm_venv=tmp_path)]

    assert sum(f"--vllm-venv {tmp_path}" in command for command in commands) == 2
    assert sum("--vllm-apart shipped" in command for command in commands) == 1


def test_a_missing_vllm_is_skipped_and_a_broken_one_fails(tmp_path: Path) -> None:
    missing, broken = vllm_outcome(None), vllm_outcome(tmp_path)

    assert missing.status.startswith("skipped: not installed here")
    assert (missing.has_failed, broken.has_failed) == (False, True)
