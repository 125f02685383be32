"""Workers of pytest-xdist that are forks of one process, which has collected the tests before.

Each worker would spend ten seconds of CPU time on imports otherwise.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from types import ModuleType

import pytest
from execnet import gateway_base, gateway_io
from execnet.gateway_base import ExecModel

from tests.support.fork_server import WORKERS, ForkedProcess, ForkServers, preload, run_server


def fork_workers(config: pytest.Config) -> None:
    """Fork the workers of this controller from a server that collects the same tests."""
    folder, arguments = str(config.invocation_params.dir), config.invocation_params.args
    servers = ForkServers(WORKERS, folder, *map(str, arguments))
    config.add_cleanup(servers.close)

    class ForkedIO(gateway_io.Popen2IOMaster):
        def __init__(self, _: object, execmodel: ExecModel) -> None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.popen = ForkedProcess(servers, [sys.executable, "-m", WORKERS], **pipes)
            gateway_base.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)

    patch = pytest.MonkeyPatch()
    patch.setattr(gateway_io, "Popen2IOMaster", ForkedIO)
    config.add_cleanup(patch.undo)


def main() -> None:
    """Run what execnet's command line of a worker runs, which has a main module without a file.

    Processes of `multiprocessing` would import the file.
    """
    sys.modules["__main__"] = ModuleType("__main__")
    exec(eval(sys.stdin.readline()), vars(sys.modules["__main__"]))


class CollectReports:
    """Plugin that notes whether each file and folder could be collected."""

    is_complete = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.is_complete &= report.passed


def _collect() -> None:
    import torch  # noqa: F401 - it starts threads that do not matter

    os.chdir(sys.argv[2])
    num_threads = _count_threads()
    arguments = [*sys.argv[3:], "--collect-only", "-qq", "-n0", "--dist=no"]
    reports = CollectReports()
    with redirect_stdout(io.StringIO()):
        code = pytest.main(arguments, [reports])
    if _count_threads() > num_threads:
        sys.exit(
            "Tests computed with several threads while they were collected. A fork would wait for "
            "them for ever: compute in tests and fixtures."
        )
    preload()  # for the processes that the workers fork
    _import_for_models()
    if not reports.is_complete or code not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        _forget_tests()


def _import_for_models() -> None:
    """Import what every worker would import when it makes its first model, which takes 3 s."""
    if models := sys.modules.get("tests.support.models"):
        assert models.import_transformers().LlamaForCausalLM


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _forget_tests() -> None:
    """Have the workers import the tests, since half imported modules would seem to be complete."""
    for name in list(sys.modules):
        if name.startswith("tests.") and not name.startswith("tests.support."):
            del sys.modules[name]


if __name__ == "__main__":
    run_server(_collect)
