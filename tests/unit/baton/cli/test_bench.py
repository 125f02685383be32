"""`baton bench` with benchmarks that are not installed."""

from __future__ import annotations

import subprocess
import sys


def test_a_research_benchmark_is_refused_with_the_command_that_runs_it() -> None:
    command = [sys.executable, "-m", "baton", "bench", "chaos"]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 2
    assert "No such command 'chaos'" in done.stderr
    assert "python -m benchmarks NAME" in done.stderr
