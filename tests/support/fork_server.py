"""Fork servers for the processes of clusters, which save each of them the import of torch.

A server imports the packages of all roles once and forks. Each fork becomes a child of the test
process and runs the command line, like a process started by Popen: it can be signalled, waited
for and killed in the same way. Processes with an environment of their own have their own
server, unless only their path of packages differs.
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
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path

from baton.cli.program import prepare

NODES = "tests.support.preloaded_nodes"
PRELOADED = (
    *(NODES, "router.__main__", "router.openai.app", "router.openai.server"),
    *("telemetry.metrics.otlp", "telemetry.tracing.otlp", "typer._adapters"),
)
# Programs that can be forked, with the module of `main`.
PROGRAMS = {"baton": "baton.__main__", "benchmarks.chaos.node": "benchmarks.chaos.node"}
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


Server = tuple[subprocess.Popen[bytes], socket.socket]


class ForkServers:
    """Starts each server process on first use. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By the variables that differ from those of the test process.
        self._servers: dict[frozenset[tuple[str, str]], Server] = {}

    def start_process(
        self, command: Sequence[str], environment: dict[str, str]
    ) -> subprocess.Popen[str]:
        """Fork a process that runs a program. Raises OSError if the server has ended."""
        _, _, program, *arguments = command
        request = json.dumps([os.getpid(), os.getcwd(), program, arguments, environment])
        read_fd, write_fd = os.pipe()
        try:
            pid = self._fork(environment, request.encode(), write_fd)
            return ForkedProcess(command, pid, read_fd)
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)

    def close(self) -> None:
        """End the servers. The processes that they forked continue."""
        for process, connection in self._servers.values():
            connection.close()
            process.wait()

    def _fork(self, environment: dict[str, str], request: bytes, output_fd: int) -> int:
        changed = dict(environment.items() - os.environ.items())
        changed.pop(PACKAGE_PATH, None)  # the fork adds it to its own path
        own = frozenset(changed.items())
        with self._lock:
            if own not in self._servers:
                self._servers[own] = _start_server({**os.environ, **changed})
            _, connection = self._servers[own]
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


def can_fork(command: Sequence[str]) -> bool:
    """Return whether this is `python -m` with a program that the servers can fork."""
    return tuple(command[:2]) == (sys.executable, "-m") and command[2] in PROGRAMS


def _start_server(environment: dict[str, str]) -> Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return process, ours


def _set_subreaper(is_on: bool) -> None:
    """Make this process the parent of grandchildren whose parent ends, or stop that."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on))


# --- Server process -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """Program that a fork runs, with its arguments and the descriptor of its output."""

    program: str
    arguments: list[str]
    output_fd: int


def serve(connection: socket.socket) -> ForkOrder | None:
    """Fork for each request. Return the order of a fork in the fork, else None."""
    while True:
        request, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 1)
        if not request:
            return None
        [output_fd] = fds
        parent_pid, folder, program, arguments, environment = json.loads(request)
        pid = _fork_child_of(parent_pid)
        if pid == 0:
            connection.close()
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.path[1:1] = filter(None, environment.get(PACKAGE_PATH, "").split(os.pathsep))
            return ForkOrder(program, arguments, output_fd)
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
    for name in (*PRELOADED, *PROGRAMS.values()):
        import_module(name)
    gc.freeze()
    order = serve(connection)
    if order is None:
        return
    sys.argv[1:] = order.arguments
    os.setsid()
    for standard_fd in (1, 2):
        os.dup2(order.output_fd, standard_fd)
    os.close(order.output_fd)
    import_module(PROGRAMS[order.program]).main()


if __name__ == "__main__":
    main()
