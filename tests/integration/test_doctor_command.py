"""`baton doctor` on this machine: real processes that transfer real bytes."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.doctor.findings import Status
from baton.doctor.model import check_model_folder
from baton.doctor.wire import check_transfer_rate
from benchmarks.chaos.s3_server import BUCKET, s3_server
from tests.support.baton_command import call_baton, run_baton
from tests.support.models import VARIANTS, make_model_folder
from tests.support.s3_environment import point_environment_at

MIB = 1 << 20


def doctor(
    *arguments: str,
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, str]]]:
    done = subprocess.run(
        [sys.executable, "-m", "baton", "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    findings = json.loads(done.stdout)["findings"]
    return done, {finding["check"]: finding for finding in findings}


def test_a_machine_that_runs_these_tests_has_no_failures(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as server:
        point_environment_at(server, monkeypatch)
        done, findings = doctor(
            *("--model", str(model_folder), "--transports", "nixl", "--patience-s", "60"),
            *("--kv-cache-memory", "4MiB", "--ports", ""),
            *("--kv-folder", str(tmp_path), "--kv-object-store", f"s3://{BUCKET}/kv"),
        )

    assert not [each for each in findings.values() if each["status"] == "fail"]
    assert done.returncode == 0
    for check in ("nixl over what UCX chooses", "nixl over tcp"):
        assert float(findings[check]["found"].split()[0]) > 0
    assert findings["room"]["status"] == "ok"
    for tier in ("host tier", "file tier", "object tier"):
        assert "GB/s" in findings[tier]["found"]
        assert f"tokens/s of {model_folder.name}" in findings[tier]["found"]
    assert not list(tmp_path.iterdir())
    assert not server.objects
    assert {"CPU", "cores", "memory", "torch", "/dev/shm", "NUMA"} <= set(findings)


def test_ucxx_transfers_bytes_and_reports_its_transports() -> None:
    findings = {one.check: one for one in check_transfer_rate(["ucxx"], patience_s=60)}

    assert {one.status for one in findings.values()} <= {Status.OK, Status.WARN}
    assert set(findings) == {"ucxx over what UCX chooses", "ucxx over tcp", "UCX has"}
    assert "tcp/lo" in findings["UCX has"].found
    assert not multiprocessing.active_children()


def test_a_transport_that_cannot_work_is_a_failure_with_exit_code_1() -> None:
    done = call_baton("doctor", "--json", "--transports", "nixl", UCX_TLS="no-such-way")

    findings = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert findings["nixl"]["status"] == "fail"
    assert "UCX_*" in findings["nixl"]["advice"]
    assert done.returncode == 1


def test_a_check_that_times_out_is_terminated_and_reported() -> None:
    [finding] = check_transfer_rate(["nixl"], patience_s=0.0)

    assert finding.status is Status.FAIL
    assert "took too long" in finding.found
    assert not multiprocessing.active_children()


def test_a_missing_model_fails() -> None:
    done = run_baton("doctor", "--json", "--transports", "", "--model", "/no-such-folder")

    findings = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert findings["model"]["status"] == "fail"
    assert done.returncode == 1


def test_a_complete_model_folder_is_reported_with_its_memory_use(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", VARIANTS["llama"])

    findings = {one.check: one for one in check_model_folder(str(folder), 4 * MIB)}

    assert {one.status for one in findings.values()} == {Status.OK}
    assert findings["weights"].found.startswith("LlamaForCausalLM, ")
    # 2 layers, K and V, 2 KV heads of 16 float32
    assert "(512 bytes a token, 8192 tokens)" in findings["room"].found


@pytest.mark.parametrize(
    ("spoil", "check", "found"),
    [
        (lambda folder: (folder / "config.json").unlink(), "weights", "config.json is missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer", "tokenizer.json"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100),
            "weights",
            "corrupt or cut short",
        ),
        (shutil.rmtree, "model", "is neither a folder"),
    ],
)
def test_missing_files_of_a_model_folder_fail_by_name(
    tmp_path: Path, spoil: object, check: str, found: str
) -> None:
    folder = make_model_folder(tmp_path / "model", VARIANTS["llama"])
    assert callable(spoil)
    spoil(folder)

    failed = [one for one in check_model_folder(str(folder), MIB) if one.status is Status.FAIL]

    assert check in {one.check for one in failed}
    assert any(found in one.found for one in failed)
    assert all(one.advice for one in failed)
