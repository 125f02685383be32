"""Processes of clusters that a server forks: children of this process, with its imports."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cluster import ClusterFailed
from baton.fork_server import ForkServer

# Modules that the fork servers of the tests do not know: the real one forks them.
IDLE = "tests.support.idle_program"
VARIABLE = "BATON_OF_THE_CLUSTER"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer({VARIABLE: "set"})
    yield server
    server.close()


def test_a_fork_is_a_child_in_a_session_of_its_own_under_its_own_command(
    forks: ForkServer,
) -> None:
    process = forks.start([IDLE, "ABSENT"])
    try:
        assert process.stdout.readline() == "\n"
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        parent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]

        assert os.getsid(process.pid) == process.pid
        assert int(parent) == os.getpid()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.0)
        assert [word.decode() for word in shown[1:]] == ["-m", IDLE, "ABSENT"]
    finally:
        process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert process.stdout.read() == ""
    process.stdout.close()
    process.send_signal(signal.SIGTERM)  # nothing is left to receive it


def test_both_outputs_and_the_exit_code_arrive(forks: ForkServer) -> None:
    process = forks.start(["json.tool", "absent.json"])

    with process.stdout as output:
        assert "absent.json" in output.read()
    assert process.wait() not in (0, None)


def test_forks_have_the_variables_of_the_cluster(forks: ForkServer) -> None:
    process = forks.start([IDLE, VARIABLE])
    try:
        assert process.stdout.readline() == "set\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_after_the_end_of_the_server_its_forks_run_and_no_others_start() -> None:
    server = ForkServer()
    process = server.start([IDLE])
    server.kill()

    with pytest.raises(ClusterFailed, match="has ended"):
        server.start([IDLE])

    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == -signal.SIGTERM
    process.stdout.close()
    server.close()
