"""`python -m benchmarks interference` with Baton's own engines, and a fake vLLM that fails."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from baton.core.errors import InvalidConfig
from benchmarks.peers.completions_api import EngineFailed
from benchmarks.peers.engines import baton_colocated, baton_disaggregated, vllm_colocated
from benchmarks.peers.interference import Interference, Turn, rows_of, run

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "demo")
SMALL = Interference(num_streams=2, num_prompts=2, prompt_tokens=200, every_s=0.2, num_rounds=1)


def test_both_deployments_are_measured_under_the_same_load() -> None:
    reported: list[Turn] = []

    run(
        SMALL,
        {
            "apart": partial(baton_disaggregated, MODEL),
            "colocated": partial(baton_colocated, MODEL),
        },
        reported.append,
    )
    rows = rows_of(reported)

    assert (
        [turn.engine for turn in reported] == [row.engine for row in rows] == ["apart", "colocated"]
    )
    for row in rows:
        found = row.figures
        assert 0 < found.itl_p50_ms <= found.itl_p99_ms <= found.itl_most_ms
        assert 0 < found.first_token_p50_s <= found.first_token_most_s
    assert rows[0].itl_p99_ratio == 1.0


def test_a_server_that_fails_to_start_is_reported_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    python.chmod(0o755)

    with pytest.raises(EngineFailed, match="no such model"), vllm_colocated(MODEL, tmp_path, 64):
        pass


def test_an_invalid_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig), vllm_colocated(MODEL, tmp_path, None):
        pass
