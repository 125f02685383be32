"""`python -m benchmarks speculation` on a small scale: figures and equal tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.baton_command import run_benchmark


def test_both_modes_are_timed_and_yield_the_same_tokens(model_folder: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    size = ["--prompt", "40", "--answer", "8", "--runs", "1", "--batches", "1,3"]
    size += ["--texts", "source,prediction,edits,noise"]
    output = ["--json", str(figures)]

    done = run_benchmark(
        "speculation", "--model", str(model_folder), *size, "--temperatures", "0,0.9", *output
    )

    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["figures"]
    assert [(row["text"], row["temperature"], row["batch"]) for row in rows] == [
        *(
            (text, at, n)
            for text in ("source", "prediction", "edits")
            for at in (0, 0.9)
            for n in (1, 3)
        ),
        *(("noise", 50.0, 1), ("noise", 50.0, 3)),
    ]
    assert all(row["same"] for row in rows)
    assert all(row["tokens_per_s_with"] > 0 and row["cpu_speed_up"] > 0 for row in rows)
    assert "speed up" in done.stdout


def test_a_comparison_without_speculation_is_refused_in_one_line() -> None:
    done = run_benchmark("speculation", "--speculative", "none")

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--speculative" in done.stderr
