"""`python -m benchmarks startup`: programs in turns, and figures of their starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.completions_api import EngineFailed
from benchmarks.peers.startup import MeasuredStart, Program, figures, programs, run


def python(name: str, code: str) -> Program:
    return Program(name, (sys.executable, "-c", code))


def test_programs_start_in_turns_after_a_start_that_does_not_count() -> None:
    starts: list[MeasuredStart] = []
    both = [python("one", "print(1)"), python("two", "print(2)")]

    run(both, 2, starts.append)

    assert [start.program for start in starts] == ["one", "two", "one", "two"]


def test_cpu_time_of_children_that_have_ended_counts() -> None:
    starts: list[MeasuredStart] = []
    works = "import time\nwhile time.process_time() < 0.2: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {works!r}]); print(1)"

    run([python("parent", code)], 1, starts.append)

    assert starts[0].cpu_s >= 0.2


def test_a_program_that_ends_without_a_token_is_an_error() -> None:
    with pytest.raises(EngineFailed, match="ended with code 3"):
        run([python("one", "raise SystemExit(3)")], 1, print)


def test_ratios_are_to_the_first_program_in_the_same_round() -> None:
    starts = [
        MeasuredStart("a", 1, 1),
        MeasuredStart("b", 3, 2),
        MeasuredStart("a", 2, 1),
        MeasuredStart("b", 8, 6),
        MeasuredStart("a", 3, 1),
    ]

    a, b = figures(starts)

    assert (a.first_token_s, a.ratio) == (2, 1)
    assert (b.first_token_s, b.ratio, b.cpu_ratio) == (5.5, 3.5, 4)


def test_llamacpp_comes_first_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()

    assert [one.name for one in programs(tmp_path, None)] == ["baton run", "baton up"]
    assert programs(tmp_path, tmp_path)[0].name == "llama.cpp"
