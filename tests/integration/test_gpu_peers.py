"""`python -m tools.gpu_peers` on the CPU, alone and beside a fake vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.throughput import EngineBench, context_of
from benchmarks.peers.peer_process import PeerFailed
from tests.support.models import VARIANTS, make_model_folder
from tools.gpu_peers import Figure, find_gpu, limit_of, measure, row_of

ANSWERS = "#!/bin/sh\necho BATON ready\nwhile read line; do echo BATON 10.0; done\n"
DIES = "#!/bin/sh\necho no such architecture >&2\nexit 3\n"
SETTINGS = [("decode", 1), ("decode", 2), ("prefill", 20)]


@pytest.fixture
def bench(tmp_path: Path) -> EngineBench:
    model = make_model_folder(tmp_path / "model", VARIANTS["llama"])
    return EngineBench(
        str(model), prompt_lens=(20,), batch_sizes=(1, 2), num_decode_steps=2, num_runs=1
    )


def environment(at: Path, python: str) -> Path:
    (at / "bin").mkdir()
    (at / "bin" / "python").write_text(python)
    (at / "bin" / "python").chmod(0o755)
    return at


def test_both_engines_are_compared_with_each_other_and_with_the_limit(
    bench: EngineBench, tmp_path: Path
) -> None:
    found: list[Figure] = []

    measure(bench, environment(tmp_path, ANSWERS), "l4", found.append)

    assert [(one.phase, one.size) for one in found] == SETTINGS
    for one in found:
        assert one.vllm == 10.0
        assert one.ratio == pytest.approx(one.baton / 10)
        assert one.limit == limit_of(bench, one.phase, one.size, "l4")


def test_without_vllm_its_place_is_empty(bench: EngineBench) -> None:
    found: list[Figure] = []

    measure(bench, None, None, found.append)

    assert sorted((one.phase, one.size) for one in found) == SETTINGS
    assert {(one.vllm, one.ratio, one.limit) for one in found} == {(None, None, None)}


def test_a_vllm_that_fails_is_named_after_baton_is_measured(
    bench: EngineBench, tmp_path: Path
) -> None:
    found: list[Figure] = []

    with pytest.raises(PeerFailed, match="no such architecture"):
        measure(bench, environment(tmp_path, DIES), None, found.append)

    assert len(found) == len(SETTINGS)


def test_a_row_has_the_shares_of_the_limit_that_are_known() -> None:
    whole = Figure("decode", 32, baton=900.0, vllm=600.0, ratio=1.5, limit=1200.0)

    assert row_of(whole) == "| decode | 32 | 900.0 | 600.0 | 1.50 | 1200.0 | 75% | 50% |"
    assert row_of(Figure("prefill", 9, 5.0)) == "| prefill | 9 | 5.0 |  |  |  |  |  |"


def test_limits_are_those_of_the_measured_contexts() -> None:
    bench = EngineBench("qwen3-0.6b", num_decode_steps=32)

    decode, prefill = (
        limit_of(bench, "decode", 1, "h100-sxm"),
        limit_of(bench, "prefill", 2048, "h100-sxm"),
    )

    assert context_of(bench) == 50
    # 1.2 GB of weights at 3.35 TB/s; 3.28 ms as in the table of limits.
    assert decode == pytest.approx(2800, rel=0.02)
    assert prefill == pytest.approx(2048 / 3.28e-3, rel=0.01)
    assert limit_of(bench, "decode", 1, None) is None
    assert find_gpu("cpu") is None
