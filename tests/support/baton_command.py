"""`baton` and benchmarks in forked processes, or in this one: both start at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from unittest.mock import patch

import pytest

import baton.cli
from tests.support.fork_server import SERVERS, ForkedProcess

BATON = (sys.executable, "-m", "baton")
BENCHMARKS = (sys.executable, "-m", "benchmarks")


def run_baton(
    *arguments: str, piped: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with text as its standard input and variables of its own."""
    return _run([*BATON, *arguments], piped, environment)


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks` to its end."""
    return _run([*BENCHMARKS, *arguments], "", {})


def _run(
    command: Sequence[str], piped: str, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE
    variables = {**os.environ, **environment}
    with ForkedProcess(
        SERVERS, command, stdin=pipe, stdout=pipe, stderr=pipe, env=variables
    ) as process:
        output, errors = process.communicate(piped)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def call_baton(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in this process."""
    output, errors = StringIO(), StringIO()
    with (
        patch.dict(os.environ, environment),
        patch.object(sys, "argv", ["baton", *arguments]),
        redirect_stdout(output),
        redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        baton.cli.main()
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())
