"""Termination of a benchmark: it ends all processes that it started."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from tests.support.baton_command import BENCHMARKS
from tests.support.child_programs import running_program

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
TIMEOUT_S = 120.0


def test_a_peer_does_not_outlive_a_terminated_bench(tmp_path: Path) -> None:
    reported = tmp_path / "told"
    os.mkfifo(reported)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\nexec 3> {reported}\necho $$ >&3\nexec sleep 1000\n")
    python.chmod(0o755)
    peer = ["--model", str(MODEL), "--vllm-venv", str(tmp_path)]

    pipe = os.open(reported, os.O_RDONLY | os.O_NONBLOCK)
    with running_program([*BENCHMARKS, "peer", *peer], is_forked=False) as bench:
        peer_pid = _next(pipe)
        bench.send_signal(signal.SIGTERM)
        code = bench.wait(TIMEOUT_S)
        rest = _next(pipe)  # end of file when all writers have ended
    os.close(pipe)

    assert peer_pid
    assert code == 128 + signal.SIGTERM
    assert rest == b""


def _next(pipe: int) -> bytes:
    ready, _, _ = select.select([pipe], [], [], TIMEOUT_S)
    assert ready, "the peer goes on"
    return os.read(pipe, 4096)
