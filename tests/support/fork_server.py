"""Fork server for `baton serve`, which saves each process of a cluster the import of torch.

The server imports the packages of all roles once and forks. Each fork becomes a child of the test
process and runs the command line, like a process started by Popen: it can be signalled, waited
for and killed in the same way.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path

from baton.__main__ import main as run_baton
from baton.cli.program import prepare

NODES = "tests.support.preloaded_nodes"
PRELOADED = (
    *(NODES, "router.__main__", "router.openai.app", "router.openai.server"),
    *("telemetry.metrics.otlp", "telemetry.tracing.otlp", "typer._adapters"),
)
SERVE = (sys.executable, "-m", "baton", "serve")
PACKAGE_PATH = "PYTHONPATH"
PR_SET_CHILD_SUBREAPER = 36
MAX_REQUEST_BYTES = 1 << 17
REPARENT_POLL_S = 0.0005


class ForkedProcess(subprocess.Popen[str]):
    """Popen of a process that exists already."""

    def __init__(self, command: Sequence[str], pid: int, output_fd: int) -> None:
        self.args, self.pid = command, pid
        self.stdin = self.stderr = None
        self.stdout = open(output_fd)  # noqa: SIM115  # closed by the reader, as in Popen
        self.returncode: int | None = None
        self._waitpid_lock = threading.Lock()
        self._child_created = True


class ForkServer:
    """Starts the server process on first use. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def start_process(
        self, command: Sequence[str], environment: dict[str, str]
    ) -> subprocess.Popen[str]:
        """Fork a `baton serve` process. Raises OSError if the server has ended."""
        arguments = command[len(SERVE) - 1 :]
        request = json.dumps([os.getpid(), os.getcwd(), arguments, environment])
        read_fd, write_fd = os.pipe()
        try:
            return ForkedProcess(command, self._fork(request.encode(), write_fd), read_fd)
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)

    def close(self) -> None:
        """End the server. The processes that it forked continue."""
        if self._server is not None:
            process, connection = self._server
            connection.close()
            process.wait()

    def _fork(self, request: bytes, output_fd: int) -> int:
        with self._lock:
            self._server = self._server or _start_server()
            _, connection = self._server
            _set_subreaper(True)
            try:
                socket.send_fds(connection, [request], [output_fd])
                reply = connection.recv(64)
            finally:
                _set_subreaper(False)
        if not reply:
            raise ChildProcessError("the fork server has ended")
        return int(reply)


def fork_context() -> ForkServerContext:
    """Return a multiprocessing context whose server has imported the packages of nodes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([NODES])
    return context


def can_fork(command: Sequence[str], environment: dict[str, str]) -> bool:
    """Return whether this is `baton serve` in our environment, but for the path of packages."""
    differs = {name for name, _ in environment.items() ^ os.environ.items()}
    return tuple(command[: len(SERVE)]) == SERVE and differs <= {PACKAGE_PATH}


def _start_server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return process, ours


def _set_subreaper(is_on: bool) -> None:
    """Make this process the parent of grandchildren whose parent ends, or stop that."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on))


# --- Server process -------------------------------------------------------------------------------


def serve(connection: socket.socket) -> tuple[list[str], int] | None:
    """Fork for each request. Return the arguments and output of a fork in the fork, else None."""
    while True:
        request, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 1)
        if not request:
            return None
        [output_fd] = fds
        parent_pid, folder, arguments, environment = json.loads(request)
        pid = _fork_child_of(parent_pid)
        if pid == 0:
            connection.close()
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.path[1:1] = filter(None, environment.get(PACKAGE_PATH, "").split(os.pathsep))
            return arguments, output_fd
        os.close(output_fd)
        connection.send(str(pid).encode())


def _fork_child_of(parent_pid: int) -> int:
    """Fork a child of our parent, a subreaper. Return the child's pid, or 0 in the child."""
    read_fd, write_fd = os.pipe()
    middle_pid = os.fork()
    if middle_pid == 0:
        middle_pid = os.getpid()
        pid = os.fork()
        if pid:
            os.write(write_fd, str(pid).encode())
            os._exit(0)
        os.close(read_fd)
        os.close(write_fd)
        while os.getppid() == middle_pid:
            time.sleep(REPARENT_POLL_S)
        if os.getppid() != parent_pid:
            os._exit(1)  # the test process has ended
        return 0
    os.waitpid(middle_pid, 0)  # after its end, our parent is the parent of the child
    pid = int(os.read(read_fd, 64))
    os.close(read_fd)
    os.close(write_fd)
    return pid


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    prepare()
    for name in PRELOADED:
        import_module(name)
    gc.freeze()
    forked = serve(connection)
    if forked is None:
        return
    sys.argv[1:], output_fd = forked
    os.setsid()
    for standard_fd in (1, 2):
        os.dup2(output_fd, standard_fd)
    os.close(output_fd)
    run_baton()


if __name__ == "__main__":
    main()
