"""`python -m benchmarks adapters` on a small scale."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.baton_command import run_benchmark


def test_steps_and_loads_are_timed(model_folder: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    size = ["--batch", "4", "--adapters", "2", "--rank", "2", "--runs", "2", "--steps", "2"]

    done = run_benchmark("adapters", "--model", str(model_folder), *size, "--json", str(figures))

    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert (found["steps"]["batch"], found["steps"]["adapters"]) == (4, 2)
    assert found["steps"]["ratio"] > 0
    assert found["load"]["load_ms"] > 0
    assert "switch ms" in done.stdout
