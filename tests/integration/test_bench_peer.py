"""`python -m benchmarks peer` with a fake peer."""

from __future__ import annotations

import json
import os
import select
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import InvalidConfig
from benchmarks.cli.peer import peer
from benchmarks.engine.throughput import EngineBench
from benchmarks.peers.peer import Comparison, PeerBench, run
from benchmarks.peers.peer_process import PeerFailed
from benchmarks.plots.chart import read_peer

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
ANSWERS = """#!/bin/sh
echo an engine says something of its own
echo BATON ready
while read line; do echo BATON 10.0; done
"""
NUM_RUNS = 3
DIES = "#!/bin/sh\necho no such architecture >&2\nexit 3\n"


def environment(at: Path, python: str) -> Path:
    (at / "bin").mkdir()
    (at / "bin" / "python").write_text(python)
    (at / "bin" / "python").chmod(0o755)
    return at


def bench(vllm: Path | None, llamacpp: Path | None, scratch: Path) -> PeerBench:
    engine = EngineBench(
        str(MODEL), prompt_lens=(20,), batch_sizes=(1, 2), num_decode_steps=2, num_runs=NUM_RUNS
    )
    return PeerBench(engine, vllm, llamacpp, scratch)


def test_each_setting_is_compared_with_each_peer(tmp_path: Path) -> None:
    venv = environment(tmp_path, ANSWERS)
    compared: list[Comparison] = []

    run(replace(bench(venv, venv, tmp_path), openvino_venv=venv), compared.append)

    assert [(one.peer, one.phase, one.size) for one in compared] == [
        ("vllm", "decode", 1),
        ("llamacpp", "decode", 1),
        ("openvino", "decode", 1),
        ("vllm", "decode", 2),
        ("llamacpp", "decode", 2),
        ("openvino", "decode", 2),
        ("vllm", "prefill", 20),
        ("llamacpp", "prefill", 20),
        ("openvino", "prefill", 20),
    ]
    for one in compared:
        assert one.peer_tokens_per_s == 10
        assert one.ratio == pytest.approx(one.baton_tokens_per_s / 10)
        assert one.worst_ratio <= one.ratio <= one.best_ratio


def test_child_processes_of_a_peer_end_with_it(tmp_path: Path) -> None:
    child = tmp_path / "child"
    begins = f"#!/bin/sh\nsleep 1000 & echo $! > {child}\n"
    venv = environment(tmp_path, ANSWERS.replace("#!/bin/sh\n", begins))

    run(bench(venv, None, tmp_path), lambda _: None)

    assert ends(int(child.read_text()))


def ends(pid: int) -> bool:
    """Return whether the process ends within a minute."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([process], [], [], 60)
        return bool(readable)
    finally:
        os.close(process)


def test_a_peer_process_is_suspended_between_measurements(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    venv = environment(tmp_path, ANSWERS.replace("#!/bin/sh\n", f"#!/bin/sh\necho $$ > {pid}\n"))
    are_stopped: list[bool] = []

    def look(_: Comparison) -> None:
        status = os.waitpid(int(pid.read_text()), os.WUNTRACED)[1]
        are_stopped.append(os.WIFSTOPPED(status))

    run(bench(venv, None, tmp_path), look)

    assert are_stopped == [True] * 3


def test_a_peer_that_exits_is_named(tmp_path: Path) -> None:
    venv = environment(tmp_path, DIES)

    with pytest.raises(PeerFailed, match="vllm ended with code 3: no such architecture"):
        run(bench(venv, None, tmp_path), lambda _: None)


def test_the_others_are_measured_without_a_peer_that_cannot_run_the_model(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    good, bad = environment(tmp_path / "good", ANSWERS), environment(tmp_path / "bad", DIES)
    compared: list[Comparison] = []
    failed: list[PeerFailed] = []

    run(bench(bad, good, tmp_path), compared.append, failed.append)

    assert [str(one) for one in failed] == ["vllm ended with code 3: no such architecture"]
    assert {one.peer for one in compared} == {"llamacpp"}


def test_the_weights_of_llamacpp_have_the_same_number_of_bits(tmp_path: Path) -> None:
    venv = environment(
        tmp_path, ANSWERS.replace("#!/bin/sh", f'#!/bin/sh\necho "$2" > {tmp_path}/args')
    )
    found = {}

    for quantize, weights in [("int4", "auto"), ("none", "q4_k_m")]:
        peer(
            str(MODEL),
            llamacpp_venv=venv,
            quantize=quantize,
            llamacpp_weights=weights,
            prompts="20",
            batches="1",
            steps=2,
            runs=1,
        )
        found[quantize] = json.loads((tmp_path / "args").read_text())["weights"]

    assert found == {"int4": "q4_0", "none": "q4_k_m"}
    with pytest.raises(InvalidConfig, match="llamacpp_weights"):
        peer(str(MODEL), llamacpp_venv=venv, llamacpp_weights="q3")


@pytest.mark.parametrize("last", ["read line", ":"])
def test_settings_before_a_peer_ended_are_kept(
    last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The peer ends during a measurement or while it is frozen."""
    answer = "read line; echo BATON 10.0\n"
    script = f"#!/bin/sh\necho BATON ready\n{answer * (1 + NUM_RUNS)}{last}\nexit 3\n"
    venv, path = environment(tmp_path, script), tmp_path / "peer.json"

    with pytest.raises(PeerFailed, match="ended with code 3"):
        peer(str(MODEL), venv, prompts="20", batches="1,2", steps=2, runs=NUM_RUNS, json_file=path)

    reported = json.loads(path.read_text(encoding="utf-8"))
    assert not reported["is_whole"]
    assert [(one.phase, one.size) for one in read_peer(path).compared] == [("decode", 1)]
    out, err = capsys.readouterr()
    assert "decode" in out
    assert "broken off" in err


def test_a_folder_without_an_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="not a virtual environment"):
        run(bench(None, tmp_path, tmp_path), lambda _: None)


def test_more_threads_than_cores_are_refused(tmp_path: Path) -> None:
    what = bench(environment(tmp_path, ANSWERS), None, tmp_path)
    many = replace(what, engine=replace(what.engine, num_threads=len(os.sched_getaffinity(0)) + 1))

    with pytest.raises(InvalidConfig, match="need as many cores"):
        run(many, lambda _: None)
