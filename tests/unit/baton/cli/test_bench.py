"""`baton bench` with benchmarks that are not installed."""

from __future__ import annotations

from tests.support.baton_command import call_baton


def test_a_research_benchmark_is_refused_with_the_command_that_runs_it() -> None:
    done = call_baton("bench", "chaos")

    assert done.returncode == 2
    assert "No such command 'chaos'" in done.stderr
    assert "python -m benchmarks NAME" in done.stderr
