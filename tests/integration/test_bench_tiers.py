"""`python -m benchmarks tiers --parts turns` on a small scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.baton_command import run_benchmark

pytestmark = pytest.mark.slow

SIZES = ("--turns", "2", "--tokens", "512", "--streams", "1", "--kv-cache-memory", "1280KiB")
MEMORIES = ("--host-memory", "16MiB", "--small-host-memory", "1MiB")


def test_second_turns_are_loaded_from_host_memory_and_files_while_others_decode(
    tmp_path: Path,
) -> None:
    figures = tmp_path / "figures.json"
    output = ("--json", str(figures))

    done = run_benchmark("tiers", "--parts", "turns", *SIZES, *MEMORIES, *output)

    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["turns"]
    assert [row["tier"] for row in rows] == ["host", "file"]
    for row in rows:
        long = [one for one in row["seconds"] if one["is_long"]]
        assert (row["turns"], len(long)) == (2, 2)
        assert {one["prefix_tokens"] for one in long} == {512}
        assert all(one["ttft_s"] > 0 for one in long)
        assert row["loads"] > 0
        assert row["gap_p50_ms"] > 0
